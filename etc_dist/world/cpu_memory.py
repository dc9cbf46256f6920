"""The "cpu" backend: symmetric memory in the shared memory of one host."""

from __future__ import annotations

from etc_dist.world.memory import Block
from etc_dist.world.pages import PAGE, SharedPages


class CpuMemory:
    """Allocates for `size` ranks, all of this host."""

    name = "cpu"
    device: int | str = "cpu"
    ranks_per_gpu = 1
    mps = False

    def __init__(self, pages: SharedPages, size: int):
        self._pages, self._size = pages, size

    def allocate(self, nbytes: int) -> Block:
        """Whole pages for each rank; SymmetricMemoryError where there is no room."""
        room = -(-max(nbytes, 1) // PAGE) * PAGE
        whole = self._pages.map(room * self._size)
        starts = range(0, room * self._size, room)
        peers = tuple(whole[start : start + nbytes] for start in starts)
        first = int(whole.ctypes.data)
        return Block(tuple(first + start for start in starts), peers, None)

    def free(self, block: Block) -> None:
        """Memory ends with the last array over it."""

    def close(self) -> None:
        """Nothing else is held."""

    def show(self) -> str:
        return "shared memory of the host"
