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
def cpu_world() -> Iterator[World]:
    cpu_world = etc_dist.start(Settings(backend="cpu"))
    yield cpu_world
    cpu_world.close()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def matmul(cpu_world: World) -> list[Any]:
    """An operation after a call, and its arrays."""
    x = np.ones((8, 16), np.float16)
    op = Matmul(world=cpu_world)
    return [op, x, op(x, x)]


def mlp(cpu_world: World) -> list[Any]:
    x = np.ones((8, 16), np.float16)
    gate, up, down = (np.ones((16, 16), np.float16) for _ in range(3))
    layer = MLP(gate, up, down, world=cpu_world)
    return [layer, x, layer(x), gate, up, down]


def program(cpu_world: World) -> list[Any]:
    new_program = etc_dist.compile(ring(cpu_world.size), cpu_world)
    run(new_program)
    return [new_program]


@pytest.mark.mpi
@pytest.mark.parametrize("make", [program, matmul, mlp])
def test_memory_and_descriptors_of_dropped_objects_are_freed(make, cpu_world):
    def drop() -> list[weakref.ref[Any]]:
        return [weakref.ref(thing) for thing in make(cpu_world)]

    drop()
    gc.collect()
    cpu_world.synchronize()
    num_descriptors = descriptors()
    before = len(cpu_world._memories), len(cpu_world._runs)
    alive = drop()
    gc.collect()
    assert [thing() for thing in alive] == [None] * len(alive)
    if cpu_world.size > 1:  # its memory waits for all ranks
        assert len(cpu_world._runs) > before[1]
        cpu_world.synchronize()
    assert (len(cpu_world._memories), len(cpu_world._runs)) == before
    assert descriptors() <= num_descriptors  # fewer: those of earlier tests


@pytest.mark.mpi
def test_arrays_of_a_call_are_not_kept_by_the_operation(cpu_world):
    op, *arrays = matmul(cpu_world)
    alive = [weakref.ref(array) for array in arrays]
    arrays.clear()
    assert [reference() for reference in alive] == [None, None]
    op.close()


@pytest.mark.mpi(ranks=[2])
@pytest.mark.parametrize("call", [lambda cpu_world: cpu_world.allocate(8), program])
def test_program_is_freed_once_all_ranks_have_dropped_it(call, cpu_world):
    things = program(cpu_world)
    for rank in range(cpu_world.size):
        assert 1 in [runs.number for runs in cpu_world._runs.values()]
        if cpu_world.rank == rank:
            things.clear()
            gc.collect()
        call(cpu_world)
    assert 1 not in [runs.number for runs in cpu_world._runs.values()]


@pytest.mark.mpi
@pytest.mark.parametrize("call", [World.synchronize, World.close])
def test_error_of_a_dropped_program_is_raised_at_the_next_end(call, cpu_world):
    dropped = ended(cpu_world, {cpu_world.size - 1})
    del dropped
    gc.collect()
    cpu_world.free_dropped()
    with pytest.raises(WaitTimeoutError, match="a run of ring was ended"):
        call(cpu_world)
    cpu_world.close()
    assert cpu_world.closed


@pytest.mark.mpi(ranks=[1])
def test_captured_program_that_is_dropped_is_not_freed(cpu_world, monkeypatch):
    monkeypatch.setattr(CpuExecutor, "is_captured", True)
    program(cpu_world)
    gc.collect()
    cpu_world.free_dropped()
    assert len(cpu_world._runs) == 1


FUNCTIONS: list[Callable[..., Any]] = [
    *(Program.launch, CpuExecutor.run, CpuExecutor.recover),
    *(RunState.prepare, RunState._allocate, RunState.start, RunState.free),
    *(World.allocate, World.free_dropped, World._recover, World._free_memory),
]


@pytest.mark.mpi(ranks=[1])
@pytest.mark.parametrize(
    "function", FUNCTIONS, ids=lambda function: function.__qualname__
)
def test_interrupt_at_each_line_leaves_a_program_usable(function, cpu_world):
    compiled = etc_dist.compile(ring(1), cpu_world)

    def grow_and_run() -> None:
        cpu_world.exclusive._is_interrupted = (
            True  # so that the run begins with recover
        )
        run(compiled)

    run(compiled)
    line = 1
    while interrupted(grow_and_run, [function.__code__], line):
        run(compiled)
        run(compiled)
        line += 1
    assert line > 1
    compiled.close()
