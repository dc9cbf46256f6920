"""NVSHMEM's host library by ctypes: the few calls that symmetric memory needs."""

from __future__ import annotations

import ctypes
import os
from ctypes import POINTER, byref, c_char, c_int, c_size_t, c_uint, c_void_p
from typing import Any, NoReturn

from etc_dist.errors import WorldError
from etc_dist.world import far_transport

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


_INITIALIZED = 2
"""The first of NVSHMEM's states in which it can be used."""

_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "nvshmemx_get_uniqueid": (c_int, [POINTER(_UniqueId)]),
    "nvshmemx_set_attr_uniqueid_args": (
        c_int,
        [c_int, c_int, POINTER(_UniqueId), POINTER(_InitAttributes)],
    ),
    "nvshmemx_hostlib_init_attr": (c_int, [c_uint, POINTER(_InitAttributes)]),
    "nvshmemx_init_status": (c_int, []),
    "nvshmemx_hostlib_finalize": (None, []),
    "nvshmemx_vendor_get_version_info": (c_int, [POINTER(c_int)] * 3),
    "nvshmemx_cumodule_init": (c_int, [c_void_p]),
    "nvshmemx_cumodule_finalize": (c_int, [c_void_p]),
    "nvshmem_align": (c_void_p, [c_size_t, c_size_t]),
    "nvshmem_free": (None, [c_void_p]),
    "nvshmem_ptr": (c_void_p, [c_void_p, c_int]),
}


def load_library() -> str:
    """Load NVSHMEM into the process, and return its path; starts nothing.

    NVLink multicast (NVLS) is switched off before, unless the user has set it: it is
    not used here, and multicast objects cost start-up time and fail on hosts that
    forbid them."""
    os.environ.setdefault("NVSHMEM_DISABLE_NVLS", "1")
    from cuda import pathfinder

    return str(pathfinder.load_nvidia_dynamic_lib("nvshmem_host").abs_path)


class NvshmemLibrary:
    """The functions of the library at `path`; their error codes raise WorldError."""

    def __init__(self, path: str, heap_size: int):
        os.environ["NVSHMEM_SYMMETRIC_SIZE"] = str(heap_size)
        self._library = ctypes.CDLL(path)
        self._modules: set[int] = set()
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(self._library, name)
            function.restype, function.argtypes = result, arguments

    def version(self) -> str:
        """The library's version, for example 3.4.5."""
        parts = c_int(), c_int(), c_int()
        self._library.nvshmemx_vendor_get_version_info(*map(byref, parts))
        return ".".join(str(part.value) for part in parts)

    def unique_id(self) -> bytes:
        """The id of a new world, made on one rank for all."""
        unique_id = _UniqueId(version=_versioned(_UniqueId))
        self._check("nvshmemx_get_uniqueid", byref(unique_id))
        return bytes(unique_id)

    def start(self, rank: int, size: int, unique_id: bytes) -> None:
        """Begin as `rank` of `size`; collective; this rank's CUDA device is current."""
        id_struct = _UniqueId.from_buffer_copy(unique_id)
        attributes = _InitAttributes(version=_versioned(_InitAttributes))
        attributes.args.version = _versioned(_InitArgs)
        attributes.args.unique_id.version = _versioned(_UniqueIdArgs)
        self._check(
            "nvshmemx_set_attr_uniqueid_args",
            rank,
            size,
            byref(id_struct),
            byref(attributes),
        )
        self._check("nvshmemx_hostlib_init_attr", _WITH_UNIQUE_ID, byref(attributes))
        # NOTE: it returns 0 also where no transport reaches a rank, to try again in the
        # next call, which ends the process then.
        status = self._library.nvshmemx_init_status()
        if status < _INITIALIZED:
            self._fail("nvshmemx_init_status", f"at least {_INITIALIZED}", status)

    def align(self, alignment: int, nbytes: int) -> int:
        """A symmetric block's local address, or 0 if there is none; collective."""
        return self._library.nvshmem_align(alignment, nbytes) or 0

    def free(self, address: int) -> None:
        """Free a block; collective."""
        self._library.nvshmem_free(address)

    def peer_address(self, address: int, rank: int) -> int:
        """The same block on `rank` as mapped here, or 0 if it is not mapped."""
        return self._library.nvshmem_ptr(address, rank) or 0

    def init_module(self, module: int) -> None:
        """Let the code of a loaded module call NVSHMEM."""
        self._check("nvshmemx_cumodule_init", module)
        self._modules.add(module)

    def end_module(self, module: int) -> None:
        """End `init_module`. NOTE: before the module is unloaded, since NVSHMEM writes
        to all that it knows when another one comes."""
        self._modules.remove(module)
        self._check("nvshmemx_cumodule_finalize", module)

    def finalize(self) -> None:
        """End NVSHMEM in this process; collective."""
        for module in list(self._modules):
            self.end_module(module)
        self._library.nvshmemx_hostlib_finalize()

    def _check(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            self._fail(name, "0", code)

    def _fail(self, name: str, wanted: str, code: int) -> NoReturn:
        raise WorldError(
            "NVSHMEM did not start",
            where=f"{name}, NVSHMEM {self.version()}",
            wanted=f"return code {wanted}",
            got=f"return code {code}",
            fix="set NVSHMEM_DEBUG=INFO and read NVSHMEM's messages; on several "
            f"hosts {far_transport.VARIABLE} must name one that works there",
        )
