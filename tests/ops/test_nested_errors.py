"""Calls inside another call of the same thread are refused on that rank alone."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import etc_dist
from etc_dist import AllGatherMatmul, MatmulReduceScatter
from etc_dist.errors import WorldError
from etc_dist.ir import device_function
from etc_dist.ops import functional
from etc_dist.world import start
from tests.graphs.calls import whole
from tests.ops.arrays import ones

pytestmark = pytest.mark.mpi


def copying(body: Callable[..., None]) -> Any:
    """A graph of one task on each rank, which makes y [n] of x by this body."""
    function = device_function(source="", reads=1, writes=1)(body)

    return partial(whole, function=function)


# name: a call inside another one; `own` is its world, `op` an operation there
NESTED: dict[str, Callable[[Any, Any], Any]] = {
    "operation": lambda cpu_world, op: op(*ones(cpu_world)),
    "function": lambda cpu_world, op: etc_dist.matmul_reduce_scatter(*ones(cpu_world)),
    "new operation": lambda cpu_world, op: AllGatherMatmul(world=cpu_world),
    "new layer": lambda cpu_world, op: etc_dist.MLP(
        *ones(cpu_world), ones(cpu_world)[1], world=cpu_world
    ),
    "compile": lambda cpu_world, op: etc_dist.compile(op.program.plan.graph, cpu_world),
    "synchronize": lambda cpu_world, op: op.synchronize(),
    "with operation": lambda cpu_world, op: op.__exit__(None, None, None),
    "with program": lambda cpu_world, op: op.program.__exit__(None, None, None),
    "with world": lambda cpu_world, op: cpu_world.__exit__(None, None, None),
    "allocate": lambda cpu_world, op: cpu_world.allocate(64),
    "start": lambda cpu_world, op: start(cpu_world.settings),
}


@pytest.mark.parametrize("name", NESTED)
def test_a_call_in_the_body_of_another_one_is_refused(name, cpu_world, monkeypatch):
    def copy(x: Any, y: Any) -> None:
        with pytest.raises(WorldError, match="made inside another call"):
            NESTED[name](cpu_world, op)
        y[...] = x

    monkeypatch.setattr(functional, "current", lambda: cpu_world)
    op = MatmulReduceScatter(world=cpu_world)
    op(*ones(cpu_world))
    program = etc_dist.compile(copying(copy)(cpu_world.size), cpu_world)
    x = np.arange(4, dtype=np.float32)
    np.testing.assert_array_equal(program.run(x=x)["y"], x)
    assert (op(*ones(cpu_world)) == 8 * cpu_world.size).all()


def test_the_error_of_a_refused_call_ends_the_run_alone(cpu_world):
    def copy(x: Any, y: Any) -> None:
        y[...] = x
        if cpu_world.rank == 0 and x[0] == 1:
            cpu_world.barrier()

    program = etc_dist.compile(copying(copy)(cpu_world.size), cpu_world)
    with pytest.raises(WorldError, match="made inside another call"):
        program.run(x=np.ones(4, np.float32))
    program.run(x=np.zeros(4, np.float32))


@pytest.mark.mpi(ranks=[2])
def test_a_call_in_a_signal_handler_of_a_waiting_rank_is_refused(cpu_world):
    refusals: list[str] = []

    def handle(*_: object) -> None:
        with pytest.raises(WorldError) as caught:
            op(*ones(cpu_world))
        refusals.append(caught.value.what)

    op = MatmulReduceScatter(world=cpu_world)
    before = signal.signal(signal.SIGALRM, handle)
    if cpu_world.rank == 0:
        time.sleep(0.5)
    else:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
    assert (op(*ones(cpu_world)) == 8 * cpu_world.size).all()
    signal.signal(signal.SIGALRM, before)
    assert refusals == ["a call was made inside another call"] * (cpu_world.rank > 0)
