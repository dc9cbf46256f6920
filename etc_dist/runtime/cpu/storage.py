"""The arrays of one rank: the caller's and the program's."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping
from math import prod
from typing import Any

import numpy as np

from etc_dist.errors import ArgumentError, expect_type
from etc_dist.ir.event import EventTensor
from etc_dist.ir.graph import GraphFunction
from etc_dist.ir.tensor import LOADABLE, Tensor, numpy_dtype
from etc_dist.runtime.arrays import Array as Argument
from etc_dist.runtime.arrays import refuse_masked

Array = np.ndarray[Any, Any]


def shape_of(tensor: Tensor | EventTensor, env: Mapping[str, Any]) -> tuple[int, ...]:
    """The shape of a tensor in an environment."""
    return tuple(int(extent.evaluate(env)) for extent in tensor.shape)


def poisoned(tensor: Tensor, env: Mapping[str, Any]) -> Array:
    """A new array filled with bytes of 0xFF: NaN, or -1 for integers."""
    array = np.empty(shape_of(tensor, env), numpy_dtype(tensor.dtype))
    poison(array)
    return array


def poison(array: Array) -> None:
    """Fill a contiguous array as `poisoned` does."""
    array.reshape(-1).view(np.uint8).fill(0xFF)


def still_poisoned(array: Array) -> Array:
    """A mask of the elements that have the bits of `poisoned`.

    NOTE: arithmetic gives NaNs with other bits."""
    bits = array.view(np.dtype(f"u{array.itemsize}"))
    is_poison: Array = bits == np.iinfo(bits.dtype).max
    return is_poison


def bind(
    tensors: Iterable[Tensor],
    arrays: Mapping[str, Array],
    env: Mapping[str, Any],
    where: str,
) -> dict[str, Array]:
    """The caller's arrays by tensor name. ArgumentError names all wrong ones."""
    wanted, got = [], []
    tensors = list(tensors)
    for tensor in tensors:
        shape, dtype = shape_of(tensor, env), numpy_dtype(tensor.dtype)
        array = arrays.get(tensor.name)
        expect_type(array, (np.ndarray, type(None)), f"{where}: {tensor.name}")
        refuse_masked(tensor.name, array)
        if array is None or array.shape != shape or array.dtype != dtype:
            wanted.append(f"{tensor.name} {list(shape)} {dtype}")
            got.append(
                f"no {tensor.name}"
                if array is None
                else f"{tensor.name} {list(array.shape)} {array.dtype}"
            )
    extra_names = sorted(set(arrays) - {tensor.name for tensor in tensors})
    got += [f"{name}, which the graph does not have" for name in extra_names]
    if got:
        raise ArgumentError(
            "the arrays do not fit the graph",
            where=where,
            wanted="; ".join(wanted) or "only the tensors of the graph",
            got="; ".join(got),
            fix="pass each tensor by its name with this shape and dtype",
        )
    return {tensor.name: arrays[tensor.name] for tensor in tensors}


def view_of(argument: Argument) -> Array:
    """A NumPy view of a caller's contiguous CPU array, which the caller keeps alive."""
    dtype = numpy_dtype(argument.dtype)
    if isinstance(argument.owner, np.ndarray):
        # As a plain array: indexing of a subclass may keep integer axes.
        # In memory order: the owner may be a transposed view.
        memory = np.asarray(argument.owner).reshape(-1, order="A")
        return memory.view(dtype).reshape(argument.shape)
    nbytes = prod(argument.shape) * dtype.itemsize
    block: Any = (ctypes.c_char * nbytes).from_address(argument.pointer)
    return np.ndarray(argument.shape, dtype, buffer=block)


def loads(graph: GraphFunction, arrays: Mapping[str, Array]) -> dict[str, Any]:
    """The part of an environment that `Load` expressions read."""
    return {
        f"@{tensor.name}": arrays[tensor.name]
        for tensor in graph.tensors
        if tensor.dtype == "int32" and tensor.kind in LOADABLE
    }
