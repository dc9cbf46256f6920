"""The caller's arrays of any library: address, shape, dtype, device."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import prod
from typing import Any

import numpy as np

from etc_dist.errors import ArgumentError
from etc_dist.ir.tensor import DTYPES as SIZES
from etc_dist.ir.tensor import numpy_dtype


@dataclass(frozen=True)
class Array:
    """An array of a call, with the caller's name for it. `device` is "cpu" or a CUDA
    device number. `order` is "C" for contiguous rows, "F" for the transposed view of
    such an array, and "" for all other strides."""

    pointer: int
    shape: tuple[int, ...]
    dtype: str
    device: int | str
    order: str
    owner: Any
    name: str
    is_read_only: bool = False

    @cached_property
    def end(self) -> int:
        """The address after its last byte; if it is contiguous or transposed."""
        return self.pointer + prod(self.shape) * SIZES[self.dtype]

    @property
    def row_bytes(self) -> int:
        """Bytes of the axis whose elements are adjacent in memory."""
        axis = self.shape[:1] if self.order == "F" else self.shape[-1:]
        return prod(axis) * SIZES[self.dtype]

    @property
    def has_odd_rows(self) -> bool:
        """Whether GPUs cannot copy its rows in bulk, and a device function might."""
        # No device function copies int32 rows in bulk.
        return self.row_bytes % 16 != 0 and self.dtype != "int32"

    def overlaps(self, array: Array) -> bool:
        """Whether they share memory; only for arrays that have an `end`."""
        return max(self.pointer, array.pointer) < min(self.end, array.end)

    def of_dtype(self, dtype: str) -> Array:
        """The same elements as `dtype` if they are given as their bits: uint8 for
        float8, which not every library has."""
        is_bits = self.dtype == "uint8" and dtype.startswith("float8")
        return replace(self, dtype=dtype) if is_bits else self

    def words(self) -> Any:
        """The bits of a contiguous array, flat and in place: a NumPy array of unsigned
        integers, or a CuPy array of the current stream."""
        count, size = prod(self.shape), SIZES[self.dtype]
        unsigned = np.dtype(f"u{size}")
        if self.device == "cpu":
            memory = (ctypes.c_uint8 * (count * size)).from_address(self.pointer)
            return np.ctypeslib.as_array(memory).view(unsigned)
        import cupy

        device = int(self.device)
        owned = cupy.cuda.UnownedMemory(self.pointer, size * count, self.owner, device)
        pointer = cupy.cuda.MemoryPointer(owned, 0)
        return cupy.ndarray(count, unsigned, memptr=pointer)

    def in_shape(self, shape: tuple[int, ...]) -> Array:
        """The same memory as a contiguous array of `shape`."""
        return replace(self, shape=shape, order="C")

    def __str__(self) -> str:
        where = "cpu" if self.device == "cpu" else f"cuda:{self.device}"
        layout = {"C": "", "F": ", transposed", "": ", not contiguous"}[self.order]
        return f"{list(self.shape)} {self.dtype} on {where}{layout}"


def order_of(shape: Sequence[int], strides: Sequence[int], unit: int = 1) -> str:
    """`Array.order` of an array with these strides, in units of one element."""
    axes = range(len(shape))
    if 0 in shape or _is_packed(shape, strides, reversed(axes), unit):
        return "C"
    return "F" if _is_packed(shape, strides, axes, unit) else ""


def _is_packed(
    shape: Sequence[int], strides: Sequence[int], axes: Iterable[int], unit: int
) -> bool:
    """Whether the elements have no gaps, with the first of `axes` the innermost."""
    for axis in axes:
        if shape[axis] != 1 and strides[axis] != unit:
            return False
        unit *= shape[axis]
    return True


def described(*arrays: Array) -> str:
    """Arrays with their names, for errors."""
    return "; ".join(f"{array.name} {array}" for array in arrays)


def _library_of(kind: type) -> str:
    names = (base.__module__.partition(".")[0] for base in kind.__mro__)
    return next((name for name in names if name in ("cupy", "torch")), "")


library_of: Callable[[type], str] = lru_cache(_library_of)
"""The library that defines the array type, or a base of it: "cupy", "torch" or ""."""


def inspect(name: str, value: Any) -> Array:
    """Read a NumPy, CuPy or torch array, or one that supports DLPack or
    `__cuda_array_interface__`; nothing is copied. TypeError for other objects."""
    if isinstance(value, np.ndarray):
        refuse_masked(name, value)
        return Array(
            value.ctypes.data,
            value.shape,
            dtype_of(value),
            "cpu",
            order_of(value.shape, value.strides, value.itemsize),
            value,
            name,
            not value.flags.writeable,
        )
    library = library_of(type(value))
    if library == "torch":
        _refuse_without_memory(name, value)
        _refuse_gradient(name, value)
        return Array(
            value.data_ptr(),
            tuple(value.shape),
            dtype_of(value),
            "cpu" if value.device.type == "cpu" else value.device.index,
            order_of(value.shape, value.stride()),
            value,
            name,
        )
    interface: dict[str, Any] = {}
    if library != "cupy":
        interface = getattr(value, "__cuda_array_interface__", {})
        value = _as_cupy(name, value)
    return Array(
        value.data.ptr,
        value.shape,
        dtype_of(value),
        value.device.id,
        order_of(value.shape, value.strides, value.itemsize),
        value,
        name,
        interface.get("data", (0, False))[1],
    )


def _as_cupy(name: str, value: Any) -> Any:
    """A CuPy array over the memory of another library's array."""
    if hasattr(value, "__dlpack__") or hasattr(value, "__cuda_array_interface__"):
        try:
            import cupy
        except ModuleNotFoundError:
            raise TypeError(
                f"{name} expects a NumPy or torch array where CuPy is not installed, "
                f"got {type(value).__name__}"
            ) from None
        make = cupy.from_dlpack if hasattr(value, "__dlpack__") else cupy.asarray
        return make(value)
    raise TypeError(
        f"{name} expects a NumPy, CuPy or torch array, or one that supports DLPack, "
        f"got {type(value).__name__}"
    )


def refuse_masked(name: str, value: Any) -> None:
    """Raise ArgumentError for a masked array."""
    if isinstance(value, np.ma.MaskedArray):
        raise ArgumentError(
            f"argument {name} is a masked array",
            where=f"argument {name}",
            wanted="an array without a mask, as all elements are read and written",
            got="numpy.ma.MaskedArray",
            fix=f"pass {name}.filled(value) for an input, {name}.data for an output",
        )


def _refuse_without_memory(name: str, tensor: Any) -> None:
    """Raise ArgumentError for a torch tensor whose memory does not hold its elements:
    freed or shrunk storage, meta and fake tensors, lazily negated views."""
    shape, strides = tuple(tensor.shape), tensor.stride()
    steps = zip(shape, strides, strict=True)
    count = 1 + sum((size - 1) * stride for size, stride in steps)
    end_byte = (tensor.storage_offset() + count) * tensor.element_size()
    num_bytes = tensor.untyped_storage().nbytes()
    kind = tensor.device.type
    if kind not in ("cpu", "cuda"):
        got = f"a tensor on the device {kind}"
    elif tensor.is_neg() or tensor.is_conj():
        got = "a view whose negation or conjugation is not computed yet"
    elif 0 not in shape and (num_bytes < end_byte or not tensor.data_ptr()):
        got = f"a storage of {num_bytes} bytes for elements that end at byte {end_byte}"
    else:
        return
    raise ArgumentError(
        f"the memory of {name} does not hold its elements",
        where=f"argument {name}, {list(shape)} {dtype_of(tensor)}",
        wanted="a tensor with its own elements in the memory of the CPU or a GPU",
        got=got,
        fix="restore the storage (a sharded parameter: gather it first), or copy the "
        "tensor with .clone()",
    )


def _needs_gradient(tensor: Any) -> bool:
    return bool(tensor.requires_grad and sys.modules["torch"].is_grad_enabled())


def _refuse_gradient(name: str, tensor: Any) -> None:
    """Raise ArgumentError for a torch tensor whose gradient torch would not compute."""
    if _needs_gradient(tensor):
        raise ArgumentError(
            f"argument {name} needs a gradient, which this function does not have",
            where=f"argument {name}",
            wanted="tensors without requires_grad, or torch.no_grad()",
            got="requires_grad=True",
            fix="call torch.ops.etc_dist or a module of etc_dist.torch to train; "
            "otherwise pass tensor.detach()",
        )


def dtype_of(value: Any) -> str:
    """The name of an array's dtype; empty if it has none."""
    return str(getattr(value, "dtype", "")).removeprefix("torch.")


UNKNOWN = object()
"""The identity of arrays without a cheap key."""


def identity(value: Any) -> Any:
    """A cheap key: equal keys mean the same memory, shape, strides and dtype, and for
    torch the same need of a gradient and of a negation. None for None; UNKNOWN for
    NumPy arrays and those of other libraries."""
    if value is None:
        return None
    library = library_of(type(value))
    if library == "torch":
        marks = _needs_gradient(value), value.is_neg()
        return value.data_ptr(), value.shape, value.stride(), value.dtype, marks
    if library == "cupy":
        return value.data.ptr, value.shape, value.strides, value.dtype
    return UNKNOWN


def empty_like(
    owner: Any, shape: tuple[int, ...], stream: Any = None, dtype: str = ""
) -> Any:
    """A new array of `shape` with the library and device of `owner`, an `Array.owner`
    (None: CuPy), and with `dtype`, by default that of `owner`; for use on the CuPy
    stream `stream`, by default on the library's current one. CuPy has no float8: uint8.
    """
    if isinstance(owner, np.ndarray):
        return np.empty(shape, numpy_dtype(dtype) if dtype else owner.dtype)
    if hasattr(owner, "new_empty"):
        kind = getattr(sys.modules["torch"], dtype) if dtype else None
        with _torch_stream(owner, stream):
            return owner.new_empty(shape, dtype=kind)
    import cupy

    bits = "uint8" if dtype.startswith("float8") else dtype
    with stream or nullcontext():
        return cupy.empty(shape, numpy_dtype(bits) if bits else owner.dtype)


def _torch_stream(tensor: Any, stream: Any) -> AbstractContextManager[Any]:
    """Makes `stream` torch's current one on the tensor's GPU, unless it is already.
    NOTE: the context takes microseconds."""
    if stream is None:
        return nullcontext()
    torch, device = sys.modules["torch"], tensor.get_device()
    if torch._C._cuda_getCurrentRawStream(device) == stream.ptr:
        return nullcontext()
    torch_stream = torch.cuda.ExternalStream(stream.ptr, device=device)
    context: AbstractContextManager[Any] = torch.cuda.stream(torch_stream)
    return context
