"""The "cuda" backend: NVSHMEM's symmetric heap on GPUs that map each other's memory.

NVSHMEM's host library is called by ctypes. It is initialised with a unique id from
rank 0, since NVSHMEM's MPI bootstrap supports only Open MPI.
"""

from __future__ import annotations

import ctypes
import os
import threading
from ctypes import POINTER, byref, c_char, c_int, c_size_t, c_uint, c_void_p
from typing import Any

from etc_dist.errors import ArgumentError, SymmetricMemoryError, WorldError
from etc_dist.settings import describe_sharing
from etc_dist.world.agreement import Agreement
from etc_dist.world.memory import ALIGNMENT, Block

# Bytes of the heap for NVSHMEM itself and for gaps between blocks, in addition to the
# setting's.
_ALLOWANCE = 128 << 20
# NVSHMEM takes GPU memory for its heap in steps of this many bytes.
_STEP = 512 << 20

# cudaDevAttrMpsEnabled: contexts on this device are served by CUDA MPS.
_MPS_ENABLED = 133

# NVSHMEM can be started once per process: its world, or None.
_owner: GpuMemory | None = None


class GpuMemory:
    """Allocates from NVSHMEM's symmetric heap of `heap_size` bytes a rank.

    NOTE: NVSHMEM may end the process when its heap or the GPU is full, instead of
    returning NULL. So allocated bytes are counted here, and larger requests are
    refused before NVSHMEM is called.
    """

    name = "cuda"

    def __init__(
        self, agreement: Agreement, device: int, heap_size: int, ranks_per_gpu: int = 1
    ):
        """Bind this rank to CUDA `device` and start NVSHMEM; collective.

        Raises WorldError on every rank where any step fails on any rank, ArgumentError
        where a heap is larger than its GPU.
        """
        self._agreement, self._heap_size = agreement, heap_size
        self._device = device
        self.device: int | str = device
        self.ranks_per_gpu, self.mps = ranks_per_gpu, False
        self._sizes: dict[int, int] = {}
        self._cupy: Any = None
        self._thread = threading.local()
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

    def allocate(self, nbytes: int) -> Block:
        """Zeroed blocks; SymmetricMemoryError where heap or GPU cannot hold them."""
        size = -(-max(nbytes, 1) // ALIGNMENT) * ALIGNMENT
        self._agreement.agree(lambda: self._require(size))
        address = self._align(size)
        self._sizes[address] = size
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
            text += f", {describe_sharing(self.ranks_per_gpu, self.mps)}"
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
        self._refuse_large_heap()
        size = self._heap_size + _ALLOWANCE
        self._library = NvshmemLibrary(load_library(), size)

    def _refuse_large_heap(self) -> None:
        """ArgumentError for a heap that the GPU can never hold.

        NOTE: by default the size is address space: NVSHMEM takes GPU memory as blocks
        are allocated, and `_require` counts it. So heaps of ranks that share a GPU may
        together be larger than it, unless NVSHMEM takes them at its start.
        """
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
        ranks = range(self._agreement.size)
        return tuple(self._library.peer_address(address, rank) for rank in ranks)

    def _view(self, address: int, nbytes: int) -> Any:
        """uint8 [nbytes] at `address`.

        A peer's memory is also labelled with this GPU: CuPy then launches here.
        """
        cupy = self._cupy
        memory = cupy.cuda.UnownedMemory(address, max(nbytes, 1), self, self._device)
        pointer = cupy.cuda.MemoryPointer(memory, 0)
        return cupy.ndarray((nbytes,), cupy.uint8, pointer)

    def _require(self, size: int) -> None:
        held = sum(self._sizes.values())
        if held + size > self._heap_size:
            raise self._exhausted(size, f"{held} of {self._heap_size} bytes in use")
        growth = held + size - self._taken
        steps = -(-growth // _STEP) * _STEP * self.ranks_per_gpu
        available = self._free_memory()
        if growth > 0 and steps > available:
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


# NVSHMEM's host library: the few calls that symmetric memory needs.

_WITH_UNIQUE_ID = 1 << 3


def _versioned(structure: type[ctypes.Structure]) -> int:
    # Version 1 in the high half, and the size of the structure.
    return (1 << 16) + ctypes.sizeof(structure)


class _UniqueId(ctypes.Structure):
    _fields_ = [("version", c_int), ("internal", c_char * 124)]


class _UniqueIdArgs(ctypes.Structure):
    _fields_ = [
        ("version", c_int),
        ("id", POINTER(_UniqueId)),
        ("rank", c_int),
        ("size", c_int),
    ]


class _InitArgs(ctypes.Structure):
    _fields_ = [
        ("version", c_int),
        ("unique_id", _UniqueIdArgs),
        ("content", c_char * 96),
    ]


class _InitAttributes(ctypes.Structure):
    _fields_ = [("version", c_int), ("mpi_comm", c_void_p), ("args", _InitArgs)]


_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "nvshmemx_get_uniqueid": (c_int, [POINTER(_UniqueId)]),
    "nvshmemx_set_attr_uniqueid_args": (
        c_int,
        [c_int, c_int, POINTER(_UniqueId), POINTER(_InitAttributes)],
    ),
    "nvshmemx_hostlib_init_attr": (c_int, [c_uint, POINTER(_InitAttributes)]),
    "nvshmemx_hostlib_finalize": (None, []),
    "nvshmemx_vendor_get_version_info": (c_int, [POINTER(c_int)] * 3),
    "nvshmem_align": (c_void_p, [c_size_t, c_size_t]),
    "nvshmem_free": (None, [c_void_p]),
    "nvshmem_ptr": (c_void_p, [c_void_p, c_int]),
}


def _is_taken_at_start() -> bool:
    """Whether the user has switched off the heap that grows."""
    value = os.environ.get("NVSHMEM_DISABLE_CUDA_VMM", "0").strip().lower()
    return value not in ("", "0", "n", "no", "f", "false", "off")


def load_library() -> str:
    """Load NVSHMEM into the process, and return its path; starts nothing.

    NVLink multicast (NVLS) and network transports are switched off before, unless the
    user has set them: neither is used here, and multicast objects cost start-up
    time and fail on hosts that forbid them.
    """
    os.environ.setdefault("NVSHMEM_DISABLE_NVLS", "1")
    os.environ.setdefault("NVSHMEM_REMOTE_TRANSPORT", "none")
    from cuda import pathfinder

    return str(pathfinder.load_nvidia_dynamic_lib("nvshmem_host").abs_path)


class NvshmemLibrary:
    """The functions of the library at `path`; their error codes raise WorldError."""

    def __init__(self, path: str, heap_size: int):
        os.environ["NVSHMEM_SYMMETRIC_SIZE"] = str(heap_size)
        self._library = ctypes.CDLL(path)
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(self._library, name)
            function.restype, function.argtypes = result, arguments

    def version(self) -> str:
        parts = c_int(), c_int(), c_int()
        self._library.nvshmemx_vendor_get_version_info(*map(byref, parts))
        return ".".join(str(part.value) for part in parts)

    def unique_id(self) -> bytes:
        """The id of a new world, made on one rank for all."""
        made = _UniqueId(version=_versioned(_UniqueId))
        self._check("nvshmemx_get_uniqueid", byref(made))
        return bytes(made)

    def start(self, rank: int, size: int, unique_id: bytes) -> None:
        """Begin as `rank` of `size`; collective; this rank's CUDA device is current."""
        made = _UniqueId.from_buffer_copy(unique_id)
        attributes = _InitAttributes(version=_versioned(_InitAttributes))
        attributes.args.version = _versioned(_InitArgs)
        attributes.args.unique_id.version = _versioned(_UniqueIdArgs)
        self._check(
            "nvshmemx_set_attr_uniqueid_args",
            rank,
            size,
            byref(made),
            byref(attributes),
        )
        self._check("nvshmemx_hostlib_init_attr", _WITH_UNIQUE_ID, byref(attributes))

    def align(self, alignment: int, nbytes: int) -> int:
        """A symmetric block's local address, or 0 if there is none; collective."""
        return self._library.nvshmem_align(alignment, nbytes) or 0

    def free(self, address: int) -> None:
        """Free a block; collective."""
        self._library.nvshmem_free(address)

    def peer_address(self, address: int, rank: int) -> int:
        """The same block on `rank` as mapped here, or 0 if it is not mapped."""
        return self._library.nvshmem_ptr(address, rank) or 0

    def finalize(self) -> None:
        """End NVSHMEM in this process; collective."""
        self._library.nvshmemx_hostlib_finalize()

    def _check(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            raise WorldError(
                "NVSHMEM did not start",
                where=f"{name}, NVSHMEM {self.version()}",
                wanted="return code 0",
                got=f"return code {code}",
                fix="set NVSHMEM_DEBUG=INFO and read NVSHMEM's messages",
            )
