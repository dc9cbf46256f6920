"""Symmetric memory: a block of the same size on every rank, reachable by all."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from etc_dist.errors import WorldError

ALIGNMENT = 1024
"""Bytes; every block begins at a multiple of it, on every rank."""


@dataclass(frozen=True)
class Allocation:
    """One allocation of a backend: the blocks of all ranks, as mapped here."""

    addresses: tuple[int, ...]
    """0 for far ranks."""
    peers: tuple[Any, ...]
    """uint8 [nbytes] over each rank's block: NumPy or CuPy arrays; None for far ranks.
    """
    handle: Any
    """For the backend's `free`."""


class Backend(ABC):
    """An allocator of symmetric memory; its methods are collective, but for `enter`,
    `restore` and `free_bytes`. Those with a body here do nothing without GPUs.

    Callers agree on each call first, so all ranks take part."""

    name: str
    device: int | str
    """The device of this rank's arrays: a CUDA device, or "cpu"."""
    ranks_per_gpu = 1
    """The largest number of ranks that share one GPU; 1 where none is shared."""
    mps = False
    """Whether CUDA MPS serves this rank's GPU."""

    def enter(self) -> int | None:
        """Make `device` the current one of this thread. Returns the GPU that was, if it
        was another. Local."""
        return None

    def restore(self, device: int) -> None:
        """Make the GPU that `enter` returned the current one again. Local."""
        return None

    @abstractmethod
    def allocate(self, nbytes: int) -> Allocation:
        """A zeroed block on every rank, or the same error on every rank:
        SymmetricMemoryError where the memory of any rank cannot hold it."""

    def free(self, block: Allocation) -> None:
        """Free a block. Without GPUs, the last array over it does."""
        return None

    @abstractmethod
    def free_bytes(self) -> int:
        """See `World.free_bytes`. Local."""

    def close(self) -> None:
        """End the backend, after all blocks are freed."""
        return None

    @abstractmethod
    def show(self) -> str:
        """A short description."""


class SymmetricMemory:
    """One block of `nbytes` bytes on each rank, made by `World.allocate`.

    NOTE: garbage collection does not free it: `free` is collective, and ranks collect
    garbage at different times. `World.close` frees the rest."""

    def __init__(
        self,
        nbytes: int,
        number: int,
        rank: int,
        block: Allocation,
        release: Callable[[SymmetricMemory], None],
    ):
        self.nbytes = nbytes
        self.number = number
        """Counts the world's allocations: the same on every rank."""
        self._rank = rank
        self._block: Allocation | None = block
        self._release = release

    @property
    def local(self) -> Any:
        """uint8 [nbytes] over this rank's block: NumPy (cpu) or CuPy (cuda)."""
        return self.block.peers[self._rank]

    @property
    def peers(self) -> tuple[Any, ...]:
        """uint8 [nbytes] over each rank's block, by rank; peers[rank] is `local`. None
        for ranks on other hosts."""
        return self.block.peers

    @property
    def addresses(self) -> tuple[int, ...]:
        """Each rank's block as an address on this rank, by rank; 0 for other hosts."""
        return self.block.addresses

    @property
    def block(self) -> Allocation:
        """The allocation of the backend; WorldError after `free`."""
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
        """Free the block on every rank. Collective, idempotent.

        Arrays over it must not be used afterwards."""
        if self._block is not None:
            self._release(self)
            self._block = None

    def show(self) -> str:
        """Its number and size, as text."""
        return f"symmetric memory {self.number} ({self.nbytes} bytes a rank)"
