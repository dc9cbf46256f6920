"""The "cuda" backend: NVSHMEM's symmetric heap on GPUs. Those of a host map each
other's memory.

NVSHMEM is initialised with a unique id from rank 0, since its MPI bootstrap supports
only Open MPI."""

from __future__ import annotations

import os
import socket
import threading
from typing import Any

from etc_dist.errors import ArgumentError, SymmetricMemoryError, WorldError
from etc_dist.settings import describe_sharing
from etc_dist.world import far_transport
from etc_dist.world.agreement import Agreement
from etc_dist.world.hosts import Hosts
from etc_dist.world.memory import ALIGNMENT, Allocation, Backend
from etc_dist.world.nvshmem import NvshmemLibrary, load_library
from etc_dist.world.rank_errors import expect_alike

# Bytes of the heap for NVSHMEM itself and for gaps between blocks, in addition to the
# setting's.
_ALLOWANCE = 128 << 20
# NVSHMEM takes GPU memory for its heap in steps of this many bytes.
_STEP = 512 << 20

# cudaDevAttrMpsEnabled: contexts on this device are served by CUDA MPS.
_MPS_ENABLED = 133

# NVSHMEM can be started once per process: its world, or None.
_owner: GpuMemory | None = None


class GpuMemory(Backend):
    """Allocates from NVSHMEM's symmetric heap of `heap_size` bytes a rank.

    NOTE: NVSHMEM may end the process when its heap or the GPU is full, instead of
    returning NULL. So allocated bytes are counted here, and larger requests are
    refused before NVSHMEM is called."""

    name = "cuda"

    def __init__(
        self,
        agreement: Agreement,
        hosts: Hosts,
        device: int,
        heap_size: int,
        ranks_per_gpu: int = 1,
    ):
        """Bind this rank to CUDA `device` and start NVSHMEM; collective.

        Raises WorldError on every rank where any step fails on any rank, ArgumentError
        where a heap is larger than its GPU."""
        self._agreement, self._hosts, self._heap_size = agreement, hosts, heap_size
        self._device = device
        self.device: int | str = device
        self.ranks_per_gpu, self.mps = ranks_per_gpu, False
        self._sizes: dict[int, int] = {}
        self._cupy: Any = None
        self._thread = threading.local()
        agreement.agree(self._bind)
        names = agreement.agree(socket.gethostname)
        expect_alike(
            agreement.agree(self._library.version),
            "versions of NVSHMEM",
            where="start of the world",
            fix="install the same nvidia-nvshmem package on all hosts",
        )
        library = self._path
        self._transport = agreement.agree(
            lambda: far_transport.prepare(names, library)
        )[agreement.rank]
        ids = agreement.agree(self._new_id)
        before = agreement.agree(self._free_memory)[agreement.rank]
        if hosts.count > 1:
            rank = agreement.rank
            far_transport.announce(rank, names[rank], self._transport)
        agreement.agree(lambda: self._start(ids[0]))
        # Bytes of GPU memory that the heap holds already; ranks on one GPU share them.
        self._taken_bytes = max(0, before - self._free_memory()) // ranks_per_gpu
        try:
            self._require_mapped_peers()
        except WorldError:
            self._finalize()
            raise

    def enter(self) -> int | None:
        before = int(self._cupy.cuda.runtime.getDevice())
        if before != self._device:
            self._cupy.cuda.Device(self._device).use()
        if not hasattr(self._thread, "has_context"):
            # NOTE: the driver's own functions need a context, which only functions of
            # the runtime make current in a new thread.
            self._cupy.cuda.runtime.free(0)
            self._thread.has_context = True
        return before if before != self._device else None

    def restore(self, device: int) -> None:
        self._cupy.cuda.Device(device).use()

    def allocate(self, nbytes: int) -> Allocation:
        size = -(-max(nbytes, 1) // ALIGNMENT) * ALIGNMENT
        self._agreement.agree(lambda: self._require(size))
        address = self._align(size)
        self._sizes[address] = size
        self._taken_bytes = max(self._taken_bytes, sum(self._sizes.values()))
        addresses = self._addresses(address)
        peers: tuple[Any, ...] = tuple(
            self._view(peer, nbytes) if peer else None for peer in addresses
        )

        def zero() -> None:
            peers[self._agreement.rank].fill(0)
            self._synchronize()

        self._agreement.agree(zero)
        return Allocation(addresses, peers, address)

    def free(self, block: Allocation) -> None:
        # Work on the GPU may still use the block: here, or by a peer's GPU.
        self._agreement.agree(self._synchronize)
        if self._sizes.pop(block.handle, None) is not None:  # also if interrupted
            self._library.free(block.handle)

    def free_bytes(self) -> int:
        pool = self._cupy.get_default_memory_pool()
        return self._free_memory() // self.ranks_per_gpu + int(pool.free_bytes())

    def close(self) -> None:
        self._agreement.agree(self._synchronize)
        self._finalize()

    def show(self) -> str:
        properties = self._cupy.cuda.runtime.getDeviceProperties(self._device)
        gpu = properties["name"].decode()
        text = f"NVSHMEM {self._library.version()}, GPU {self._device}: {gpu}"
        if self.ranks_per_gpu > 1:
            text += f", {describe_sharing(self.ranks_per_gpu, self.mps)}"
        if self._hosts.count > 1:
            text += f", far ranks by {self._transport}"
        return text

    @property
    def library(self) -> NvshmemLibrary:
        """NVSHMEM, for device code that calls it."""
        return self._library

    def _bind(self) -> None:
        if _owner is not None:
            raise WorldError(
                "a second world on GPUs was started",
                where=f"rank {self._agreement.rank}",
                wanted="one world on GPUs a process, as NVSHMEM allows",
                got="another one that is still open",
                fix="use etc_dist.current(), or close the other world first",
            )
        import cupy

        self._cupy = cupy
        cupy.cuda.Device(self._device).use()
        # NVSHMEM uses the CUDA context that is current: this call makes it.
        cupy.cuda.runtime.free(0)
        attribute = cupy.cuda.runtime.deviceGetAttribute
        self.mps = bool(attribute(_MPS_ENABLED, self._device))
        self._refuse_large_heap()
        size = self._heap_size + _ALLOWANCE
        self._path = load_library()
        self._library = NvshmemLibrary(self._path, size)

    def _refuse_large_heap(self) -> None:
        """ArgumentError for a heap that the GPU can never hold.

        NOTE: by default the size is address space: NVSHMEM takes GPU memory as blocks
        are allocated, and `_require` counts it. So heaps of ranks that share a GPU may
        together be larger than it, unless NVSHMEM takes them at its start."""
        total = int(self._cupy.cuda.runtime.memGetInfo()[1])
        ranks = self.ranks_per_gpu if _is_taken_at_start() else 1
        if self._heap_size * ranks > total:
            shared = f", by {ranks} ranks each" if ranks > 1 else ""
            raise ArgumentError(
                "the symmetric heap is larger than the memory of the GPU",
                where=f"rank {self._agreement.rank}, GPU {self._device}",
                wanted=f"at most {total // ranks} bytes a rank",
                got=f"{self._heap_size} bytes{shared}",
                fix="lower ETC_DIST_SYMMETRIC_SIZE or Settings.symmetric_size",
            )

    def _new_id(self) -> bytes:
        return self._library.unique_id() if self._agreement.rank == 0 else b""

    def _start(self, unique_id: bytes) -> None:
        global _owner
        self._library.start(self._agreement.rank, self._agreement.size, unique_id)
        _owner = self

    def _finalize(self) -> None:
        global _owner
        self._library.finalize()
        far_transport.withdraw()
        _owner = None

    def _require_mapped_peers(self) -> None:
        """Refuse hosts whose GPUs cannot load and store in each other's memory."""
        address = self._align(ALIGNMENT)
        addresses = self._addresses(address)

        def check() -> None:
            unmapped = [rank for rank in self._hosts.near if not addresses[rank]]
            if unmapped:
                raise WorldError(
                    "some GPUs cannot reach each other's memory",
                    where=f"rank {self._agreement.rank}, GPU {self._device}",
                    wanted="the memory of all ranks of this host mapped by NVSHMEM",
                    got=f"no mapping of ranks {unmapped}",
                    fix="use GPUs with peer access on each host (nvidia-smi topo -m); "
                    "GPUs of a host without peer access are not supported yet",
                )

        try:
            self._agreement.agree(check)
        finally:
            self._library.free(address)

    def _align(self, size: int) -> int:
        """A block's local address; SymmetricMemoryError on all where any has none."""
        address = self._library.align(ALIGNMENT, size)

        def check() -> None:
            if not address:
                raise self._exhausted(size, "NVSHMEM returned NULL")

        # NOTE: blocks of other ranks are not freed: freeing is collective, and the rank
        # without a block could not take part. Symmetric heaps fail on all ranks.
        self._agreement.agree(check)
        return address

    def _addresses(self, address: int) -> tuple[int, ...]:
        """The same block on each rank; 0 for far ranks, also where it is mapped."""
        addresses = [0] * self._hosts.size
        for rank in self._hosts.near:
            addresses[rank] = self._library.peer_address(address, rank)
        return tuple(addresses)

    def _view(self, address: int, nbytes: int) -> Any:
        """uint8 [nbytes] at `address`.

        A peer's memory is also labelled with this GPU: CuPy then launches here."""
        cupy = self._cupy
        memory = cupy.cuda.UnownedMemory(address, max(nbytes, 1), self, self._device)
        pointer = cupy.cuda.MemoryPointer(memory, 0)
        return cupy.ndarray((nbytes,), cupy.uint8, pointer)

    def _require(self, size: int) -> None:
        num_bytes = sum(self._sizes.values())
        if num_bytes + size > self._heap_size:
            raise self._exhausted(
                size, f"{num_bytes} of {self._heap_size} bytes in use"
            )
        growth = num_bytes + size - self._taken_bytes
        step_bytes = -(-growth // _STEP) * _STEP * self.ranks_per_gpu
        available = self._free_memory()
        if growth > 0 and step_bytes > available:
            raise self._exhausted(size, f"{available} bytes left on GPU {self._device}")

    def _exhausted(self, size: int, got: str) -> SymmetricMemoryError:
        return SymmetricMemoryError(
            "the symmetric heap cannot hold this allocation",
            where="world.allocate on the cuda backend",
            wanted=f"{size} bytes on every rank",
            got=got,
            fix="raise ETC_DIST_SYMMETRIC_SIZE, allocate less, or free symmetric "
            "memory and programs that are unused",
        )

    def _free_memory(self) -> int:
        return int(self._cupy.cuda.runtime.memGetInfo()[0])

    def _synchronize(self) -> None:
        self._cupy.cuda.runtime.deviceSynchronize()


def _is_taken_at_start() -> bool:
    """Whether the user has switched off the heap that grows."""
    value = os.environ.get("NVSHMEM_DISABLE_CUDA_VMM", "0").strip().lower()
    return value not in ("", "0", "n", "no", "f", "false", "off")


def library() -> NvshmemLibrary:
    """NVSHMEM, which is started."""
    assert _owner is not None
    return _owner.library
