"""Tasks that begin before their last wait is met."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

import etc_dist
from etc_dist import Program, World
from etc_dist.errors import WaitTimeoutError
from tests.graphs.early import early, inputs, reference
from tests.ops.arrays import Arrays


def program_of(world: World, schedule: str, **options: Any) -> Program:
    graph = early(world.size, **options)
    return etc_dist.compile(graph, world, schedule=schedule, trace=True)


def rows(program: Program) -> int:
    return 3 * program.workers


def check(program: Program, world: World, seed: int) -> None:
    arrays, operands = Arrays(world.backend), inputs(rows(program), seed)
    results = program.run(**{k: arrays.put(v) for k, v in operands.items()})
    program.synchronize()
    for name, expected in reference(operands).items():
        assert arrays.get(results[name]).tolist() == expected.tolist()


@pytest.mark.mpi(ranks=[1])
@pytest.mark.parametrize("schedule", ["static", "dynamic"])
@pytest.mark.parametrize("gathers", [False, True], ids=["strided", "ticket"])
def test_a_body_may_wait_never_once_or_twice(gathers, schedule, one_rank):
    program = program_of(one_rank, schedule, gathers=gathers)
    for seed in range(2):
        check(program, one_rank, seed)
        # No task ran more often than the others.
        ran = Counter((r.call, r.task) for r in program.trace().records)
        assert len(set(ran.values())) == 1
        assert len(ran) == 5 * rows(program)
    program.close()


@pytest.mark.mpi(ranks=[1])
def test_a_started_task_ends_when_its_wait_times_out(one_rank, short_timeout):
    wrong = program_of(short_timeout, "static", gathers=True, notifies=False)
    right = program_of(short_timeout, "static", gathers=True)
    with pytest.raises(WaitTimeoutError) as caught:
        check(wrong, short_timeout, 0)
    events = {record.event.partition("[")[0] for record in caught.value.records}
    assert events and events <= {"there", "done"}
    check(right, short_timeout, 1)
    wrong.close()
    right.close()
