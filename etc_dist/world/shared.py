"""The "cpu" backend: symmetric memory in MPI shared windows of one host."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from etc_dist.errors import SymmetricMemoryError
from etc_dist.world.meeting import Meeting
from etc_dist.world.memory import ALIGNMENT, Block
from etc_dist.world.windows import segment

if TYPE_CHECKING:
    from mpi4py import MPI

# Where MPI libraries on Linux keep shared windows.
_TMPFS = "/dev/shm"


class SharedMemory:
    """Allocates from the memory of one host; `node` holds all ranks of the world."""

    name = "cpu"
    device: int | str = "cpu"
    ranks_per_gpu = 1
    mps = False

    def __init__(self, node: MPI.Intracomm, meeting: Meeting):
        self._node, self._meeting = node, meeting

    def allocate(self, nbytes: int) -> Block:
        """A window with one segment a rank; SymmetricMemoryError where it fails."""
        room = -(-nbytes // ALIGNMENT) * ALIGNMENT + ALIGNMENT
        self._meeting.agree(lambda: self._require(room * self._node.size))
        window: MPI.Win | None = None

        def allocate() -> int:
            nonlocal window
            window = _allocate(room, self._node)
            own = segment(window, self._node.rank)
            return -int(own.ctypes.data) % ALIGNMENT

        # NOTE: the skip to an aligned start is the owner's: peers map the same bytes
        # at other addresses.
        skips = self._meeting.agree(allocate)
        assert window is not None
        peers = []
        for rank, skip in enumerate(skips):
            peers.append(segment(window, rank)[skip : skip + nbytes])
        peers[self._node.rank].fill(0)
        addresses = tuple(int(peer.ctypes.data) for peer in peers)
        return Block(addresses, tuple(peers), window)

    def free(self, block: Block) -> None:
        block.handle.Free()

    def close(self) -> None:
        """Windows are freed one by one; nothing else is held."""

    def show(self) -> str:
        return "MPI shared memory"

    def _require(self, total: int) -> None:
        """Refuse what the host cannot hold.

        NOTE: MPI allocates without a look at what is left; the first write to a page
        that does not exist would end the process with SIGBUS.
        """
        if self._node.rank != 0 or not os.path.isdir(_TMPFS):
            return
        status = os.statvfs(_TMPFS)
        available = status.f_bavail * status.f_frsize
        if total > available:
            raise _exhausted(total, f"{available} bytes left in {_TMPFS}")


def _allocate(room: int, node: MPI.Intracomm) -> MPI.Win:
    from mpi4py import MPI

    try:
        return MPI.Win.Allocate_shared(room, 1, comm=node)
    except (MPI.Exception, MemoryError) as fault:
        raise _exhausted(room * node.size, f"MPI: {fault}") from fault


def _exhausted(total: int, got: str) -> SymmetricMemoryError:
    return SymmetricMemoryError(
        "the host's shared memory cannot hold this allocation",
        where="world.allocate on the cpu backend",
        wanted=f"{total} bytes for all ranks of this host together",
        got=got,
        fix="allocate less, free symmetric memory that is no longer used, or give the "
        f"host a larger {_TMPFS} (docker: --shm-size)",
    )
