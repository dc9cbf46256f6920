"""Tensors of torch in the CPU's memory, by torch or by a stand-in."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.ops.arrays import Host


class Tensor:
    """The attributes of a torch tensor that calls use, over a NumPy array."""

    device = SimpleNamespace(type="cpu")
    requires_grad = False

    def __init__(self, array: Host):
        self.array = array
        self.shape, self.dtype = array.shape, f"torch.{array.dtype}"

    def data_ptr(self) -> int:
        return int(self.array.ctypes.data)

    def stride(self) -> tuple[int, ...]:
        return tuple(step // self.array.itemsize for step in self.array.strides)

    def storage_offset(self) -> int:
        return 0

    def element_size(self) -> int:
        return int(self.array.itemsize)

    def untyped_storage(self) -> Any:
        return SimpleNamespace(nbytes=lambda: self.array.nbytes)

    def is_neg(self) -> bool:
        return False

    is_conj = is_neg

    def new_empty(self, shape: tuple[int, ...], dtype: None = None) -> Tensor:
        return Tensor(np.empty(shape, self.array.dtype))


Tensor.__module__ = "torch"


def _as_torch(array: Host) -> Any:
    import torch

    return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)


def _of_torch(tensor: Any) -> Host:
    return np.asarray(tensor.float())


LIBRARIES: dict[str, tuple[Callable[[Host], Any], Callable[[Any], Host]]] = {
    "stand-in": (Tensor, lambda tensor: tensor.array.astype(np.float32)),
    "torch": (_as_torch, _of_torch),
}
"""By name: bfloat16 arrays as tensors in the same memory, and tensors as float32."""
