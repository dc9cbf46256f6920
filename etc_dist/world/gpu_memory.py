"""The "cuda" backend: symmetric memory of GPUs that map each other's memory."""

from __future__ import annotations

from typing import Any

from etc_dist.errors import SymmetricMemoryError, WorldError
from etc_dist.world import nvshmem_library
from etc_dist.world.agreement import Agreement
from etc_dist.world.memory import ALIGNMENT, Block
from etc_dist.world.nvshmem_library import NvshmemLibrary

# Bytes of the heap for NVSHMEM's own use and for gaps between blocks, on top of what
# the settings promise to programs.
_ALLOWANCE = 128 << 20
# NVSHMEM takes GPU memory for its heap in steps of this many bytes.
_STEP = 512 << 20

# cudaDevAttrMpsEnabled: contexts on this device are served by CUDA MPS.
_MPS_ENABLED = 133

# NVSHMEM is one a process: the world that has it, or None.
_owner: GpuMemory | None = None


def sharing(ranks_per_gpu: int, mps: bool) -> str:
    """What a person has to know of a GPU that several ranks share."""
    how = "under CUDA MPS" if mps else "time-sliced (no CUDA MPS)"
    return f"shared by {ranks_per_gpu} ranks {how}: times mean nothing"


class GpuMemory:
    """Allocates from NVSHMEM's symmetric heap of `heap_size` bytes a rank.

    NOTE: NVSHMEM may end the process when its heap or the GPU is full, instead of
    returning NULL. So what programs hold is counted here, and what does not fit is
    refused before NVSHMEM is asked.
    """

    name = "cuda"

    def __init__(
        self, agreement: Agreement, device: int, heap_size: int, ranks_per_gpu: int = 1
    ):
        """Bind this rank to CUDA `device` and start NVSHMEM; collective.

        Raises WorldError on every rank where any step fails on any rank.
        """
        self._agreement, self._heap_size = agreement, heap_size
        self._device = device
        self.device: int | str = device
        self.ranks_per_gpu, self.mps = ranks_per_gpu, False
        self._sizes: dict[int, int] = {}
        self._cupy: Any = None
        agreement.agree(self._bind)
        ids = agreement.agree(self._new_id)
        before = agreement.agree(self._free_memory)[agreement.rank]
        agreement.agree(lambda: self._start(ids[0]))
        # Bytes of GPU memory that the heap holds already; ranks on one GPU share them.
        self._taken = max(0, before - self._free_memory()) // ranks_per_gpu
        try:
            self._require_mapped_peers()
        except WorldError:
            self._finalize()
            raise

    def allocate(self, nbytes: int) -> Block:
        """Zeroed blocks; SymmetricMemoryError where heap or GPU cannot hold them."""
        room = -(-max(nbytes, 1) // ALIGNMENT) * ALIGNMENT
        self._agreement.agree(lambda: self._require(room))
        address = self._align(room)
        self._sizes[address] = room
        self._taken = max(self._taken, sum(self._sizes.values()))
        addresses = self._addresses(address)
        peers = tuple(self._view(peer, nbytes) for peer in addresses)

        def zero() -> None:
            peers[self._agreement.rank].fill(0)
            self._synchronize()

        self._agreement.agree(zero)
        return Block(addresses, peers, address)

    def free(self, block: Block) -> None:
        # Work on the GPU may still use the block: here, or by a peer's GPU.
        self._agreement.agree(self._synchronize)
        self._library.free(block.handle)
        del self._sizes[block.handle]

    def close(self) -> None:
        self._agreement.agree(self._synchronize)
        self._finalize()

    def show(self) -> str:
        properties = self._cupy.cuda.runtime.getDeviceProperties(self._device)
        gpu = properties["name"].decode()
        text = f"NVSHMEM {self._library.version()}, GPU {self._device}: {gpu}"
        if self.ranks_per_gpu > 1:
            text += f", {sharing(self.ranks_per_gpu, self.mps)}"
        return text

    def _bind(self) -> None:
        if _owner is not None:
            raise WorldError(
                "a second world on GPUs was started",
                where=f"rank {self._agreement.rank}",
                wanted="one world on GPUs a process, as NVSHMEM allows",
                got="another one that is still open",
                fix="use etc_dist.world.current(), or close the other world first",
            )
        import cupy

        self._cupy = cupy
        cupy.cuda.Device(self._device).use()
        # NVSHMEM uses the CUDA context that is current: this call makes it.
        cupy.cuda.runtime.free(0)
        attribute = cupy.cuda.runtime.deviceGetAttribute
        self.mps = bool(attribute(_MPS_ENABLED, self._device))
        size = self._heap_size + _ALLOWANCE
        self._library = NvshmemLibrary(nvshmem_library.find(), size)

    def _new_id(self) -> bytes:
        return self._library.unique_id() if self._agreement.rank == 0 else b""

    def _start(self, unique_id: bytes) -> None:
        global _owner
        self._library.start(self._agreement.rank, self._agreement.size, unique_id)
        _owner = self

    def _finalize(self) -> None:
        global _owner
        self._library.finalize()
        _owner = None

    def _require_mapped_peers(self) -> None:
        """Refuse worlds whose GPUs cannot load and store in each other's memory."""
        address = self._align(ALIGNMENT)
        addresses = self._addresses(address)

        def check() -> None:
            unmapped = [rank for rank, peer in enumerate(addresses) if not peer]
            if unmapped:
                raise WorldError(
                    "some GPUs cannot reach each other's memory",
                    where=f"rank {self._agreement.rank}, GPU {self._device}",
                    wanted="every rank's memory mapped by NVSHMEM (NVLink, one host)",
                    got=f"no mapping of ranks {unmapped}",
                    fix="use GPUs of one host with peer access (nvidia-smi topo -m); "
                    "other hosts and GPUs without peer access are not supported yet",
                )

        try:
            self._agreement.agree(check)
        finally:
            self._library.free(address)

    def _align(self, room: int) -> int:
        """A block's local address; SymmetricMemoryError on all where any has none."""
        address = self._library.align(ALIGNMENT, room)

        def check() -> None:
            if not address:
                raise self._exhausted(room, "NVSHMEM returned NULL")

        # NOTE: blocks that other ranks got are not given back: freeing is collective,
        # and the rank without one would not take part. Symmetric heaps fail alike.
        self._agreement.agree(check)
        return address

    def _addresses(self, address: int) -> tuple[int, ...]:
        ranks = range(self._agreement.size)
        return tuple(self._library.peer_address(address, rank) for rank in ranks)

    def _view(self, address: int, nbytes: int) -> Any:
        """uint8 [nbytes] at `address`.

        A peer's memory, too, is given this GPU's number: CuPy then launches here.
        """
        cupy = self._cupy
        memory = cupy.cuda.UnownedMemory(address, max(nbytes, 1), self, self._device)
        pointer = cupy.cuda.MemoryPointer(memory, 0)
        return cupy.ndarray((nbytes,), cupy.uint8, pointer)

    def _require(self, room: int) -> None:
        held = sum(self._sizes.values())
        if held + room > self._heap_size:
            raise self._exhausted(room, f"{held} of {self._heap_size} bytes in use")
        growth = held + room - self._taken
        steps = -(-growth // _STEP) * _STEP * self.ranks_per_gpu
        available = self._free_memory()
        if growth > 0 and steps > available:
            raise self._exhausted(room, f"{available} bytes left on GPU {self._device}")

    def _exhausted(self, room: int, got: str) -> SymmetricMemoryError:
        return SymmetricMemoryError(
            "the symmetric heap cannot hold this allocation",
            where="world.allocate on the cuda backend",
            wanted=f"{room} bytes on every rank",
            got=got,
            fix="raise ETC_DIST_SYMMETRIC_SIZE, allocate less, or free symmetric "
            "memory and programs that are no longer used",
        )

    def _free_memory(self) -> int:
        return int(self._cupy.cuda.runtime.memGetInfo()[0])

    def _synchronize(self) -> None:
        self._cupy.cuda.runtime.deviceSynchronize()
