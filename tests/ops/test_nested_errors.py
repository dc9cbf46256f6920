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
    made = device_function(source="", reads=1, writes=1)(body)

    return partial(whole, function=made)


# name: a call inside another one; `own` is its world, `op` an operation there
NESTED: dict[str, Callable[[Any, Any], Any]] = {
    "operation": lambda own, op: op(*ones(own)),
    "function": lambda own, op: etc_dist.matmul_reduce_scatter(*ones(own)),
    "new operation": lambda own, op: AllGatherMatmul(world=own),
    "new layer": lambda own, op: etc_dist.MLP(*ones(own), ones(own)[1], world=own),
    "compile": lambda own, op: etc_dist.compile(op.program.plan.graph, own),
    "synchronize": lambda own, op: op.synchronize(),
    "with operation": lambda own, op: op.__exit__(None, None, None),
    "with program": lambda own, op: op.program.__exit__(None, None, None),
    "with world": lambda own, op: own.__exit__(None, None, None),
    "allocate": lambda own, op: own.allocate(64),
    "start": lambda own, op: start(own.settings),
}


@pytest.mark.parametrize("name", NESTED)
def test_a_call_in_the_body_of_another_one_is_refused(name, own, monkeypatch):
    def copy(x: Any, y: Any) -> None:
        with pytest.raises(WorldError, match="made inside another call"):
            NESTED[name](own, op)
        y[...] = x

    monkeypatch.setattr(functional, "current", lambda: own)
    op = MatmulReduceScatter(world=own)
    op(*ones(own))
    program = etc_dist.compile(copying(copy)(own.size), own)
    x = np.arange(4, dtype=np.float32)
    np.testing.assert_array_equal(program.run(x=x)["y"], x)
    assert (op(*ones(own)) == 8 * own.size).all()


def test_the_error_of_a_refused_call_ends_the_run_alone(own):
    def copy(x: Any, y: Any) -> None:
        y[...] = x
        if own.rank == 0 and x[0] == 1:
            own.barrier()

    program = etc_dist.compile(copying(copy)(own.size), own)
    with pytest.raises(WorldError, match="made inside another call"):
        program.run(x=np.ones(4, np.float32))
    program.run(x=np.zeros(4, np.float32))


@pytest.mark.mpi(ranks=[2])
def test_a_call_in_a_signal_handler_of_a_waiting_rank_is_refused(own):
    refused: list[str] = []

    def handle(*_: object) -> None:
        with pytest.raises(WorldError) as caught:
            op(*ones(own))
        refused.append(caught.value.what)

    op = MatmulReduceScatter(world=own)
    before = signal.signal(signal.SIGALRM, handle)
    if own.rank == 0:
        time.sleep(0.5)
    else:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
    assert (op(*ones(own)) == 8 * own.size).all()
    signal.signal(signal.SIGALRM, before)
    assert refused == ["a call was made inside another call"] * (own.rank > 0)
