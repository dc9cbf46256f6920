"""Memory that grows, also where captured CUDA graphs refer to it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from etc_dist import World
from etc_dist.errors import SymmetricMemoryError, WorldError
from etc_dist.runtime.memory_plan import Capacity
from etc_dist.runtime.program_memory import ProgramMemory

pytestmark = pytest.mark.mpi


def make_own(capacity: Capacity) -> tuple[Any, Any]:
    return np.zeros(64, np.uint8), np.empty(capacity.local, np.uint8)


def sized(rows: int) -> Capacity:
    """What a shape of `rows` rows needs."""
    return Capacity(max(64, rows // 4), 4096 * rows, 1024 * rows)


@pytest.fixture
def memory(world: World) -> Iterator[ProgramMemory]:
    memory = ProgramMemory(world)
    yield memory
    memory.close()


def is_open(world: World, block: Any) -> bool:
    return block.number in world._memories


def test_memory_that_is_not_captured_is_replaced(memory, world):
    memory.grow(Capacity(64, 8192, 100), make_own)
    first = memory.latest
    memory.grow(Capacity(100, 4096, 200), make_own)
    assert memory.latest.capacity == Capacity(100, 8192, 200)
    assert list(memory) == [memory.latest]
    assert not is_open(world, first.block)
    assert memory.show() == ""


def test_captured_memory_stays_as_it_is(memory, world):
    memory.grow(sized(8), make_own)
    old, before = memory.latest, memory.generation
    old.block.local[:] = 7
    old.is_captured = world.rank == 0  # on one rank, which all agree on
    memory.grow(sized(9), make_own)
    assert memory.generation > before
    assert [block is old for block in memory] == [True, False]
    assert is_open(world, old.block) and (old.block.local == 7).all()
    assert memory.latest.capacity.holds(plan(sized(9)))
    assert not memory.latest.is_captured
    assert memory.is_captured == (world.rank == 0)
    assert memory.show() == (
        f"memory: {memory.latest.capacity.nbytes} bytes a rank; "
        f"kept for captured CUDA graphs: {old.capacity.nbytes} bytes\n"
    )


def plan(capacity: Capacity) -> Any:
    class Plan:
        event_count = capacity.events
        symmetric_bytes, local_bytes = capacity.symmetric, capacity.local
        flagged_bytes = capacity.flagged

    return Plan


@pytest.mark.parametrize("step", [1, 7, 64, 500])
def test_all_that_is_kept_is_at_most_twice_the_largest(step, memory):
    for rows in range(1, 1000, step):
        capacity = sized(rows)
        if memory.latest is None or not memory.latest.capacity.holds(plan(capacity)):
            memory.grow(capacity, make_own)
        memory.latest.is_captured = True
        *older, latest = memory
        heads = 2048 * len(older)
        assert latest.capacity.nbytes <= 2 * capacity.nbytes
        assert (
            sum(block.capacity.nbytes for block in older) <= 2 * capacity.nbytes + heads
        )


def test_smaller_shapes_after_the_largest_keep_nothing(memory):
    for rows in (512, 64, 512, 1):
        if memory.latest is None or not memory.latest.capacity.holds(plan(sized(rows))):
            memory.grow(sized(rows), make_own)
        memory.latest.is_captured = True
    assert len(list(memory)) == 1


@pytest.mark.mpi(ranks=[1])
def test_a_part_that_does_not_grow_is_not_doubled_for_ever():
    capacity = Capacity(64, 10_000, 0)
    for events in (65, 1000, 5000, 10_000):
        capacity = capacity.doubled(Capacity(events, 10_000, 0))
        assert capacity.symmetric <= 20_000
        assert events <= capacity.events <= 2 * events


def test_captured_memory_survives_growth_that_fails(memory, world):
    def refuse(capacity: Capacity) -> Any:
        raise MemoryError

    memory.grow(sized(8), make_own)
    old, num_blocks = memory.latest, len(world._memories)
    old.is_captured = True
    with pytest.raises(SymmetricMemoryError):
        memory.grow(sized(2**60), make_own)
    with pytest.raises(WorldError, match="MemoryError"):
        memory.grow(sized(9), refuse if world.rank == 0 else make_own)
    assert list(memory) == [old] and is_open(world, old.block)
    assert len(world._memories) == num_blocks


def test_close_frees_the_kept_memory(memory, world):
    num_blocks = len(world._memories)
    for rows in (1, 2, 4):
        memory.grow(sized(rows), make_own)
        memory.latest.is_captured = True
    assert len(world._memories) == num_blocks + 3
    memory.close()
    memory.close()
    assert len(world._memories) == num_blocks and list(memory) == []
