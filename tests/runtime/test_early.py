"""Tasks that begin before their last wait is met."""

from __future__ import annotations

import pytest

import etc_dist
from tests.ops.arrays import Arrays
from tests.runtime.early import early, inputs, reference


@pytest.mark.mpi
@pytest.mark.parametrize("schedule", ["static", "dynamic"])
@pytest.mark.parametrize("picks", [False, True], ids=["in turn", "by ticket"])
def test_a_body_may_wait_never_once_or_twice(picks, schedule, world):
    arrays = Arrays(world.backend)
    graph = early(world.size, picks=picks)
    program = etc_dist.compile(graph, world, schedule=schedule)
    for seed in range(3):
        given = inputs(300, seed)
        y = program.run(**{k: arrays.put(v) for k, v in given.items()})["y"]
        program.synchronize()
        assert arrays.get(y).tolist() == reference(given).tolist()
    program.close()
