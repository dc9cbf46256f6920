"""Symmetric memory: a block of the same size on every rank, reachable by all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from etc_dist.errors import WorldError

ALIGNMENT = 1024
"""Bytes; every block begins at a multiple of it, on every rank."""


@dataclass(frozen=True)
class Block:
    """What a backend gives for one allocation, by rank, as seen from this rank."""

    addresses: tuple[int, ...]
    peers: tuple[Any, ...]
    """uint8 [nbytes] over each rank's block: NumPy or CuPy arrays."""
    handle: Any
    """The backend's own, given back at `free`."""


class Backend(Protocol):
    """Where symmetric memory comes from; every method is collective.

    Callers have met before each call, so all ranks are known to be there.
    """

    name: str
    device: int | str
    """The CUDA device of this rank, or "cpu": where its arrays have to be."""
    ranks_per_gpu: int
    """The largest number of ranks that share one GPU; 1 where none is shared."""
    mps: bool
    """Whether CUDA MPS serves this rank's GPU."""

    def allocate(self, nbytes: int) -> Block:
        """A zeroed block on every rank, or the same error on every rank."""

    def free(self, block: Block) -> None:
        """Give a block back."""

    def close(self) -> None:
        """End the backend; no block is left."""

    def show(self) -> str:
        """What the memory is, in a few words."""


class SymmetricMemory:
    """One block of `nbytes` bytes on each rank, made by `World.allocate`.

    NOTE: there is no freeing on garbage collection: `free` is collective, and ranks
    collect garbage at different times. What is left is freed by `World.close`.
    """

    def __init__(
        self,
        nbytes: int,
        number: int,
        rank: int,
        block: Block,
        release: Callable[[SymmetricMemory], None],
    ):
        self.nbytes = nbytes
        self.number = number
        """Counts the world's allocations: the same on every rank."""
        self._rank = rank
        self._block: Block | None = block
        self._release = release

    @property
    def local(self) -> Any:
        """uint8 [nbytes] over this rank's block: NumPy (cpu) or CuPy (cuda)."""
        return self.block.peers[self._rank]

    @property
    def peers(self) -> tuple[Any, ...]:
        """uint8 [nbytes] over each rank's block, by rank; peers[rank] is `local`."""
        return self.block.peers

    @property
    def addresses(self) -> tuple[int, ...]:
        """Each rank's block as an address valid on this rank, by rank."""
        return self.block.addresses

    @property
    def block(self) -> Block:
        """What the backend gave; WorldError once freed."""
        if self._block is None:
            raise WorldError(
                "symmetric memory was used after it was freed",
                where=self.show(),
                wanted="memory that is still allocated",
                got="freed memory",
                fix="free it after its last use, on every rank",
            )
        return self._block

    def free(self) -> None:
        """Give the block back on every rank; collective; a second call does nothing.

        Arrays still held over it must not be touched any more.
        """
        if self._block is not None:
            self._release(self)
            self._block = None

    def show(self) -> str:
        return f"symmetric memory {self.number} ({self.nbytes} bytes a rank)"
