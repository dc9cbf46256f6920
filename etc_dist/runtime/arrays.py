"""The caller's arrays, whatever library they come from, as plain facts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import prod
from typing import Any

import numpy as np

from etc_dist.errors import ArgumentError
from etc_dist.ir.tensor import DTYPES as SIZES


@dataclass(frozen=True)
class Array:
    """Where an array lies, what it is, and what the caller calls it. `device` is "cpu"
    or a CUDA device number."""

    pointer: int
    shape: tuple[int, ...]
    dtype: str
    device: int | str
    contiguous: bool
    owner: Any
    name: str
    given_shape: tuple[int, ...] | None = None
    """The caller's shape, where an operation uses the memory with another one."""

    @cached_property
    def end(self) -> int:
        """Behind its last byte, if it is contiguous and of a dtype that graphs know."""
        return self.pointer + prod(self.shape) * SIZES[self.dtype]

    def overlaps(self, other: Array) -> bool:
        """Whether they share memory; only for arrays that have an `end`."""
        return max(self.pointer, other.pointer) < min(self.end, other.end)

    def lies_on(self, device: int | str) -> bool:
        """Whether a program on `device` can read it where it is."""
        return self.contiguous and self.device == device

    def reshape(self, shape: tuple[int, ...]) -> Array:
        """The same memory with another shape; only for contiguous arrays."""
        return replace(self, shape=shape, given_shape=self.shape)

    def __str__(self) -> str:
        where = "cpu" if self.device == "cpu" else f"cuda:{self.device}"
        layout = "" if self.contiguous else ", not contiguous"
        return f"{list(self.given_shape or self.shape)} {self.dtype} on {where}{layout}"


def described(*arrays: Array) -> str:
    """Arrays by their names, as errors tell of them."""
    return "; ".join(f"{array.name} {array}" for array in arrays)


def place_on(device: int | str) -> str:
    """What `Array.lies_on` asks for, in words."""
    return "contiguous, on " + ("the CPU" if device == "cpu" else f"cuda:{device}")


def _library_of(kind: type) -> str:
    names = (base.__module__.partition(".")[0] for base in kind.__mro__)
    return next((name for name in names if name in ("cupy", "torch")), "")


library_of: Callable[[type], str] = lru_cache(_library_of)
"""Whose arrays a type is of, or is derived from: "cupy", "torch" or ""."""


def inspect(name: str, value: Any) -> Array:
    """The facts of a NumPy, CuPy or torch array, or of anything that speaks DLPack or
    `__cuda_array_interface__`; nothing is copied. Raises ArgumentError for the rest."""
    if isinstance(value, np.ndarray):
        if isinstance(value, np.ma.MaskedArray):
            raise _masked(name)
        return Array(
            value.ctypes.data,
            value.shape,
            dtype_of(value),
            "cpu",
            value.flags.c_contiguous,
            value,
            name,
        )
    library = library_of(type(value))
    if library == "torch":
        return Array(
            value.data_ptr(),
            tuple(value.shape),
            dtype_of(value),
            "cpu" if value.device.type == "cpu" else value.device.index,
            value.is_contiguous(),
            value,
            name,
        )
    if library != "cupy" and hasattr(value, "__dlpack__"):
        import cupy

        value = cupy.from_dlpack(value)
    elif library != "cupy" and hasattr(value, "__cuda_array_interface__"):
        import cupy

        value = cupy.asarray(value)
    elif library != "cupy":
        raise ArgumentError(
            f"argument {name} is not an array",
            where=name,
            wanted="a NumPy, CuPy or torch array, or one that speaks DLPack",
            got=type(value).__name__,
            fix="pass an array",
        )
    return Array(
        value.data.ptr,
        value.shape,
        dtype_of(value),
        value.device.id,
        value.flags.c_contiguous,
        value,
        name,
    )


def _masked(name: str) -> ArgumentError:
    return ArgumentError(
        f"argument {name} is a masked array",
        where=f"argument {name}",
        wanted="an array without a mask, as all elements are read and written",
        got="numpy.ma.MaskedArray",
        fix=f"pass {name}.filled(value) for an input, {name}.data for an output",
    )


def dtype_of(value: Any) -> str:
    """The name of an array's dtype; empty for what has none."""
    return str(getattr(value, "dtype", "")).removeprefix("torch.")


UNKNOWN = object()
"""The identity of arrays that no cheap key tells apart."""


def identity(value: Any) -> Any:
    """A cheap key: equal keys mean equal facts. None for None; UNKNOWN for arrays of
    libraries that are not known here."""
    if value is None:
        return None
    library = library_of(type(value))
    if library == "torch":
        return value.data_ptr(), value.shape, value.stride(), value.dtype
    if library == "cupy":
        return value.data.ptr, value.shape, value.strides, value.dtype
    return UNKNOWN


def empty_like(like: Array, shape: tuple[int, ...]) -> Any:
    """A new array of `shape` with `like`'s library, dtype and device."""
    owner = like.owner
    if hasattr(owner, "new_empty"):
        return owner.new_empty(shape)
    if isinstance(owner, np.ndarray):
        return np.empty(shape, owner.dtype)
    import cupy

    return cupy.empty(shape, owner.dtype)
