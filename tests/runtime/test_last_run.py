"""Programs that are dropped or interrupted: their memory, and their next runs."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import etc_dist
from etc_dist import MLP, Matmul, World
from etc_dist.errors import WaitTimeoutError
from etc_dist.program import Program
from etc_dist.runtime.cpu.executor import CpuExecutor
from etc_dist.runtime.cpu.run_state import RunState
from etc_dist.settings import Settings
from tests.graphs.ring import ring
from tests.interrupts import interrupted
from tests.test_program_errors import ended, run


@pytest.fixture
def own() -> Iterator[World]:
    own = etc_dist.start(Settings(backend="cpu"))
    yield own
    own.close()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def matmul(own: World) -> list[Any]:
    """An operation after a call, and its arrays."""
    x = np.ones((8, 16), np.float16)
    op = Matmul(world=own)
    return [op, x, op(x, x)]


def mlp(own: World) -> list[Any]:
    x = np.ones((8, 16), np.float16)
    gate, up, down = (np.ones((16, 16), np.float16) for _ in range(3))
    layer = MLP(gate, up, down, world=own)
    return [layer, x, layer(x), gate, up, down]


def program(own: World) -> list[Any]:
    made = etc_dist.compile(ring(own.size), own)
    run(made)
    return [made]


@pytest.mark.mpi
@pytest.mark.parametrize("make", [program, matmul, mlp])
def test_memory_and_descriptors_of_dropped_objects_are_freed(make, own):
    def drop() -> list[weakref.ref[Any]]:
        return [weakref.ref(one) for one in make(own)]

    drop()
    gc.collect()
    own.synchronize()
    num_descriptors = descriptors()
    before = len(own._memories), len(own._runs)
    alive = drop()
    gc.collect()
    assert [one() for one in alive] == [None] * len(alive)
    if own.size > 1:  # its memory waits for all ranks
        assert len(own._runs) > before[1]
        own.synchronize()
    assert (len(own._memories), len(own._runs)) == before
    assert descriptors() <= num_descriptors  # fewer: those of earlier tests


@pytest.mark.mpi
def test_arrays_of_a_call_are_not_kept_by_the_operation(own):
    op, *arrays = matmul(own)
    alive = [weakref.ref(array) for array in arrays]
    arrays.clear()
    assert [one() for one in alive] == [None, None]
    op.close()


@pytest.mark.mpi(ranks=[2])
@pytest.mark.parametrize("call", [lambda own: own.allocate(8), program])
def test_program_is_freed_once_all_ranks_have_dropped_it(call, own):
    kept = program(own)
    for rank in range(own.size):
        assert 1 in [runs.number for runs in own._runs.values()]
        if own.rank == rank:
            kept.clear()
            gc.collect()
        call(own)
    assert 1 not in [runs.number for runs in own._runs.values()]


@pytest.mark.mpi
@pytest.mark.parametrize("call", [World.synchronize, World.close])
def test_error_of_a_dropped_program_is_raised_at_the_next_end(call, own):
    dropped = ended(own, {own.size - 1})
    del dropped
    gc.collect()
    own.free_dropped()
    with pytest.raises(WaitTimeoutError, match="a run of ring was ended"):
        call(own)
    own.close()
    assert own.closed


@pytest.mark.mpi(ranks=[1])
def test_captured_program_that_is_dropped_is_not_freed(own, monkeypatch):
    monkeypatch.setattr(CpuExecutor, "is_captured", True)
    program(own)
    gc.collect()
    own.free_dropped()
    assert len(own._runs) == 1


FUNCTIONS: list[Callable[..., Any]] = [
    *(Program.launch, CpuExecutor.run, CpuExecutor.recover),
    *(RunState.prepare, RunState._allocate, RunState.start, RunState.free),
    *(World.allocate, World.free_dropped, World._recover, World._free_memory),
]


@pytest.mark.mpi(ranks=[1])
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda one: one.__qualname__)
def test_interrupt_at_each_line_leaves_a_program_usable(function, own):
    made = etc_dist.compile(ring(1), own)

    def grow_and_run() -> None:
        own.exclusive._is_interrupted = True  # so that the run begins with recover
        run(made)

    run(made)
    line = 1
    while interrupted(grow_and_run, [function.__code__], line):
        run(made)
        run(made)
        line += 1
    assert line > 1
    made.close()
