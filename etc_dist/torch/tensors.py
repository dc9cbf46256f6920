"""Tensors as arrays of the backend, and as rows of a matrix."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

_BITS = {torch.bfloat16: ml_dtypes.bfloat16, torch.float8_e4m3fn: np.uint8}
"""The dtypes that NumPy does not have, and those with the same bits."""
_INTEGERS = {1: torch.uint8, 2: torch.int16}


def as_array(tensor: Tensor) -> Any:
    """The same memory as an array of the backend: the tensor itself on a GPU, a NumPy
    array on the CPU."""
    plain = tensor.detach() if tensor.requires_grad else tensor
    if tensor.is_cuda:
        return plain
    bits = _BITS.get(tensor.dtype)
    if bits is None:
        return plain.numpy()
    return plain.view(_INTEGERS[tensor.element_size()]).numpy().view(bits)


def as_tensor(array: Any) -> Tensor:
    """The same memory as a tensor: the reverse of `as_array`."""
    if isinstance(array, Tensor):
        return array
    dtype: torch.dtype = getattr(torch, array.dtype.name)
    bits = np.dtype(f"i{array.itemsize}")
    return torch.from_numpy(array.view(bits)).view(dtype)


def dtype_name(tensor: Tensor) -> str:
    """The name of the dtype, as in graphs."""
    return str(tensor.dtype).removeprefix("torch.")


def as_rows(tensor: Tensor, dim: int) -> Tensor:
    """A contiguous matrix of the vectors along the last axis, `dim` the slowest of the
    other axes. A view, unless `dim` is not the outermost axis in memory."""
    if tensor.dim() > 2:
        tensor = tensor.movedim(dim, 0).flatten(0, -2)
    return tensor.contiguous()


def from_rows(rows: Tensor, shape: torch.Size, dim: int) -> Tensor:
    """The reverse for a result that has `shape` but another number of vectors along
    `dim`, and of elements in a vector: a view."""
    if len(shape) == 2:
        return rows
    other_extents = [extent for axis, extent in enumerate(shape[:-1]) if axis != dim]
    return rows.view(-1, *other_extents, rows.shape[-1]).movedim(0, dim)


def as_weight(matrix: Tensor) -> Tensor:
    """[K, N] as the weight [N, K] of an operation. A view, if the memory of either is
    contiguous; otherwise a copy."""
    weight = matrix.t()
    return weight if matrix.is_contiguous() else weight.contiguous()
