"""Tensor maps: how bulk copies see a tensor. Encoded by the CUDA driver."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache

import numpy as np

from etc_dist.codegen.layout import MAP_BYTES
from etc_dist.errors import ArgumentError
from etc_dist.ir.function import TmaBox

_TYPES = {"float16": 6, "float32": 7, "bfloat16": 9}
_SWIZZLE_128B = 3
_PROMOTION_256B = 3


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def encode(
    pointer: int, shape: Sequence[int], dtype: str, itemsize: int, box: TmaBox
) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """The 128 bytes of a map of a row-major tensor of 2 or 3 axes; copies are clipped
    at each axis, so that a box never reaches into the next matrix of a stack."""
    columns, rows, stack = (*reversed(shape), 1)[:3]
    storage = np.zeros(2 * MAP_BYTES, np.uint8)
    at = -storage.ctypes.data % MAP_BYTES
    out = storage[at : at + MAP_BYTES]
    extents = (ctypes.c_uint64 * 3)(columns, rows, stack)
    pitches = (ctypes.c_uint64 * 2)(columns * itemsize, rows * columns * itemsize)
    sides = (ctypes.c_uint32 * 3)(box.columns, box.rows, 1)
    steps = (ctypes.c_uint32 * 3)(1, 1, 1)
    code = _driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(out.ctypes.data),
        ctypes.c_int(_TYPES[dtype]),
        ctypes.c_uint32(3),
        ctypes.c_void_p(pointer),
        extents,
        pitches,
        sides,
        steps,
        ctypes.c_int(0),
        ctypes.c_int(_SWIZZLE_128B),
        ctypes.c_int(_PROMOTION_256B),
        ctypes.c_int(0),
    )
    if code:
        raise ArgumentError(
            "an array cannot be read by bulk copies",
            where=f"array at {pointer:#x}",
            wanted="a 16-byte aligned address and rows of a multiple of 16 bytes",
            got=f"shape {list(shape)} {dtype} (driver code {code})",
            fix="align the array, or pad its rows to a multiple of 16 bytes",
        )
    return out.copy()
