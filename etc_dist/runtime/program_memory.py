"""The memory of a program on GPUs, which grows with its shapes.

Memory that a CUDA graph may refer to is kept; later runs use larger memory. Each has
counters, epochs and symmetric tensors of its own, so replays and later runs are as
independent as those of two programs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from etc_dist.errors import EtcDistError
from etc_dist.runtime.memory_plan import Capacity

if TYPE_CHECKING:
    from etc_dist.world import SymmetricMemory, World

MakeOwn = Callable[[Capacity], tuple[Any, Any]]
"""A control block at epoch 1 and local scratch, on this rank's GPU. Local."""


@dataclass
class LaunchMemory:
    """The memory that the arguments of a launch refer to. is_captured: those of a CUDA
    graph may refer to it, too."""

    capacity: Capacity
    block: SymmetricMemory
    control: Any
    local: Any
    is_captured: bool = False


class ProgramMemory:
    """All memory of a program, equally large on all ranks. latest: that of the next
    runs, None before the first. generation: counts the changes of `latest`."""

    def __init__(self, world: World):
        self._world = world
        self.latest: LaunchMemory | None = None
        self.generation = 0
        self._kept_memories: list[LaunchMemory] = []

    def __iter__(self) -> Iterator[LaunchMemory]:
        yield from self._kept_memories
        if self.latest is not None:
            yield self.latest

    @property
    def is_captured(self) -> bool:
        """Whether CUDA graphs may refer to any of it."""
        return any(memory.is_captured for memory in self)

    def grow(self, demand: Capacity, make_own: MakeOwn) -> None:
        """Allocate memory for `demand`, and keep the latest one if it is captured on
        any rank. Collective; no run is in flight on any rank.

        Raises SymmetricMemoryError on all ranks if too large; captures stay usable."""
        latest = self.latest
        self.generation += 1
        if latest is None:
            self.latest = self._allocate(demand, make_own)
        elif any(self._world.agree(lambda: latest.is_captured)):
            larger = self._allocate(latest.capacity.doubled(demand), make_own)
            self._kept_memories.append(latest)
            self.latest = larger
        else:
            self.latest = None
            latest.block.free()
            self.latest = self._allocate(latest.capacity.joined(demand), make_own)

    def close(self) -> None:
        """Free all. Collective, idempotent; no run is in flight on any rank."""
        every = list(self)
        self.latest, self._kept_memories = None, []
        for memory in every:
            memory.block.free()

    def show(self) -> str:
        """How much is kept, where any is."""
        if self.latest is None or not self._kept_memories:
            return ""
        num_kept_bytes = sum(memory.capacity.nbytes for memory in self._kept_memories)
        return (
            f"memory: {self.latest.capacity.nbytes} bytes a rank; "
            f"kept for captured CUDA graphs: {num_kept_bytes} bytes\n"
        )

    def _allocate(self, capacity: Capacity, make_own: MakeOwn) -> LaunchMemory:
        block = self._world.allocate(capacity.block_bytes)
        memories: list[tuple[Any, Any]] = []
        try:
            self._world.agree_done(lambda: memories.append(make_own(capacity)))
        except EtcDistError:  # of all ranks
            if not self._world.broken:
                block.free()
            raise
        return LaunchMemory(capacity, block, *memories[0])
