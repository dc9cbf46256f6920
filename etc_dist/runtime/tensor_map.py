"""Tensor maps of bulk copies, encoded by the CUDA driver."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from math import prod

import numpy as np

from etc_dist.codegen.layout import MAP_BYTES
from etc_dist.errors import ArgumentError, WorldError
from etc_dist.ir.function import TmaBox

_TYPES = {"float8_e4m3fn": 0, "float16": 6, "float32": 7, "bfloat16": 9}
"""The driver's types of elements; float8 is copied as bytes."""
_SWIZZLE_128B = 3
_PROMOTION_128B = 2
"""What L2 fetches at once, a line of a box. With 256 bytes, boxes of weights stream at
4.0 to 4.2 TB/s in place of 4.4 to 4.5, on an H200: benchmarks/log/performance.md."""
_INVALID_VALUE = 1


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def encode(
    pointer: int, shape: Sequence[int], dtype: str, itemsize: int, box: TmaBox
) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """The 128 bytes of a map of a row-major tensor of 2 or more axes: matrices, or
    stacks of them. Copies are clipped at each axis: a box never includes rows of the
    next matrix of a stack. The driver refuses a tensor without elements, which no task
    reads: its map is that of a box. Raises WorldError for an error of the driver."""
    storage = np.zeros(2 * MAP_BYTES, np.uint8)
    at = -storage.ctypes.data % MAP_BYTES
    out = storage[at : at + MAP_BYTES]
    axes = axes_of(shape if all(shape) else _one_box(box), itemsize, box)
    extents, sides, pitches = zip(*axes, strict=True)
    code = _driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(out.ctypes.data),
        ctypes.c_int(_TYPES[dtype]),
        ctypes.c_uint32(len(axes)),
        ctypes.c_void_p(pointer),
        (ctypes.c_uint64 * len(axes))(*extents),
        (ctypes.c_uint64 * len(axes))(*pitches[1:]),
        (ctypes.c_uint32 * len(axes))(*sides),
        (ctypes.c_uint32 * len(axes))(*[1] * len(axes)),
        ctypes.c_int(0),
        ctypes.c_int(_SWIZZLE_128B),
        ctypes.c_int(_PROMOTION_128B),
        ctypes.c_int(0),
    )
    if code == _INVALID_VALUE:
        wanted = "a 16-byte aligned address and rows of a multiple of 16 bytes"
        raise _refused(pointer, shape, dtype, wanted)
    if code:
        raise WorldError(
            "the CUDA driver made no TMA descriptor of an array",
            where=f"array at {pointer:#x}, shape {list(shape)} {dtype}",
            wanted="cuTensorMapEncodeTiled to return 0",
            got=f"error {code} of the CUDA driver",
            fix="restart the job, and run etc-dist doctor if it happens again",
        )
    return out.copy()


def axes_of(
    shape: Sequence[int], itemsize: int, box: TmaBox
) -> list[tuple[int, int, int]]:
    """By axis of a map, the innermost first: its extent, the side of the box along it,
    and the bytes between neighbours."""
    assert isinstance(box.rows, int)  # see TmaBox.at
    *stack, rows, columns = shape
    row = columns * itemsize
    return [
        (columns, box.columns, itemsize),
        (rows, box.rows, row),
        (prod(stack), 1, rows * row),
    ]


def _one_box(box: TmaBox) -> tuple[int, int]:
    assert isinstance(box.rows, int)  # see TmaBox.at
    return box.rows, box.columns


def _refused(
    pointer: int, shape: Sequence[int], dtype: str, wanted: str
) -> ArgumentError:
    return ArgumentError(
        "an array cannot be read by TMA",
        where=f"array at {pointer:#x}",
        wanted=wanted,
        got=f"shape {list(shape)} {dtype}",
        fix="align the array, or pad its rows",
    )
