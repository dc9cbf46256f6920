"""The weights of a rank while they are read: arrays in the memory of its backend, which
are filled piece by piece. So the host has no copy of a model on a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np

from etc_dist.functions.scaled_weights import E4M3
from etc_dist.ir.tensor import numpy_dtype

EXPONENTS = {"bfloat16": 0x7F80, "float16": 0x7C00, "float32": 0x7F800000, E4M3: 0x7F}
"""The bits that all are 1 in what is not finite."""
AT_ONCE = 1 << 23
"""Numbers that are copied or examined at once: each takes its bytes again."""


class HeldWeights:
    """Arrays of zeros by name, of which pieces are stored."""

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        dtypes: Mapping[str, str],
        backend: str,
    ) -> None:
        """MemoryError or ValueError for arrays that do not fit."""
        self._is_on_host, self._dtypes = backend == "cpu", dtypes
        xp: Any = np
        if not self._is_on_host:
            import cupy

            xp = cupy
        self._put = xp.asarray
        self._bits = {
            name: xp.zeros(shape, _unsigned(dtypes[name]))
            for name, shape in shapes.items()
        }

    def shape(self, name: str, index: Any) -> tuple[int, ...]:
        """Of an array at an index."""
        shape: tuple[int, ...] = self._bits[name][index].shape
        return shape

    def store(self, name: str, index: Any, piece: Any, numbers: Any) -> bool:
        """Store numbers of NumPy, rounded to the dtype of the array, in a piece of it
        at an index. Returns whether all are finite."""
        dtype, to = self._dtypes[name], self._bits[name][index][piece]
        rows = max(1, AT_ONCE // max(1, prod(to.shape[1:])))
        is_finite = True
        for first in range(0, len(to), rows):
            part = slice(first, first + rows)
            with np.errstate(invalid="ignore", over="ignore"):
                rounded = np.ascontiguousarray(numbers[part], numpy_dtype(dtype))
            bits = rounded.view(_unsigned(dtype))
            to[part] = self._put(bits)
            is_finite &= are_finite(bits.reshape(-1), dtype)
        return is_finite

    def has_rows(self, name: str, rows: slice, numbers: Any) -> bool:
        """Whether some rows of an array are numbers of NumPy, rounded to its dtype."""
        bits, dtype = self._bits[name][rows], numpy_dtype(self._dtypes[name])
        if bits.shape != numbers.shape:
            return False
        step = max(1, AT_ONCE // max(1, prod(bits.shape[1:])))
        for first in range(0, len(bits), step):
            part = slice(first, first + step)
            with np.errstate(invalid="ignore", over="ignore"):
                rounded = numbers[part].astype(dtype)
            own_bits = bits[part] if self._is_on_host else bits[part].get()
            if not np.array_equal(rounded, own_bits.view(dtype)):
                return False
        return True

    def arrays(self) -> dict[str, Any]:
        """All arrays, of the backend's library; in CuPy those of float8 as uint8."""
        return {
            name: bits
            if dtype == E4M3 and not self._is_on_host
            else bits.view(numpy_dtype(dtype))
            for name, bits in self._bits.items()
            for dtype in (self._dtypes[name],)
        }


def are_finite(bits: Any, dtype: str) -> bool:
    """Whether numbers are, by their bits: a flat array of NumPy or CuPy."""
    most = EXPONENTS[dtype]
    parts = range(0, len(bits), AT_ONCE)
    return all((bits[n : n + AT_ONCE] & most).max() < most for n in parts)


def _unsigned(dtype: str) -> Any:
    # NOTE: CuPy has no float8, and few operations on bf16.
    return np.dtype(f"u{numpy_dtype(dtype).itemsize}")
