"""Dynamic plans between processes: each rank finds its own ready tasks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from etc_dist.errors import WaitTimeoutError
from etc_dist.runtime.cpu import CpuExecutor
from etc_dist.schedule import schedule_dynamic
from etc_dist.world import start
from tests.graphs.ring import doubled_ring
from tests.runtime.programs import OPS, case, ring_inputs

pytestmark = pytest.mark.mpi


@pytest.fixture(scope="module")
def short_timeout(world):
    """A world with a short wait limit."""
    new_world = start(replace(world.settings, backend="cpu", wait_limit=0.5))
    yield new_world
    new_world.close()


@pytest.mark.mpi(ranks=[1, 4])
@pytest.mark.parametrize("op", OPS)
def test_a_run_gives_the_reference(op, short_timeout, rng):
    c = case(op, short_timeout.size, rng, (40, 24, 32))
    executor = CpuExecutor(schedule_dynamic(c.plan.graph), short_timeout)
    for _ in range(3):
        y = np.zeros(c.expected[short_timeout.rank].shape, np.float32)
        executor.run({**c.inputs[short_timeout.rank], "y": y}, c.dims)
        c.check(short_timeout.rank, y)
    executor.close()


def test_every_rank_reports_a_wait_that_is_never_met(short_timeout):
    graph = doubled_ring(short_timeout.size)
    silent = tuple(replace(c, notifies=()) for c in graph.calls)
    executor = CpuExecutor(
        schedule_dynamic(replace(graph, calls=silent)), short_timeout
    )
    arrays = ring_inputs(short_timeout.rank, 8)
    with pytest.raises(WaitTimeoutError) as caught:
        executor.run({**arrays, "y": np.zeros(8, np.float32)}, {"rows": 8})
    records = [str(record) for record in caught.value.records]
    assert records == [
        f"rank {rank}, tensor lane: take[{i}] waits for here[{i}]: have 0, want 1"
        for rank in range(short_timeout.size)
        for i in range(2)
    ]
    executor.close()
