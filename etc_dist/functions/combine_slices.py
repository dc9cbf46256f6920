"""Combining the slices of attention; CUDA half in
`kernels/functions/combine_slices.cuh`."""

from __future__ import annotations

from typing import Any

import numpy as np

from etc_dist.functions.matmul import two_byte
from etc_dist.ir import DeviceFunction, Extent, Operand
from etc_dist.ir.function import TENSOR


def combine_slices(head_dim: int, dtype: str) -> DeviceFunction:
    """sums [rows, heads, slices, head_dim] and stats [rows, heads, slices, 2] of
    `attend`, in fp32 -> y [rows, heads * head_dim] in `dtype`, combined in order; zeros
    for a row without positions."""

    def body(sums: Any, stats: Any, y: Any) -> None:
        most, weights = stats[..., 0], stats[..., 1]
        largest = most.max(axis=-1, keepdims=True)
        scale = np.exp2(most - np.where(np.isinf(largest), 0, largest))
        total = np.zeros(sums.shape[:2] + sums.shape[3:], np.float32)
        weight = np.zeros(sums.shape[:2], np.float32)
        for s in range(sums.shape[2]):
            total += sums[:, :, s] * scale[..., s, None]
            weight += weights[..., s] * scale[..., s]
        total /= np.where(weight == 0, 1, weight)[..., None]
        y[...] = total.reshape(y.shape).astype(y.dtype)

    slices = Extent(name="slices", whole=True)
    columns = Extent(begins=8, name="heads", times=head_dim)
    return DeviceFunction(
        name="combine_slices",
        body=body,
        source="functions/combine_slices.cuh",
        lane=TENSOR,
        reads=2,
        writes=1,
        constants={"kHeadDim": head_dim, "kIsHalf": int(dtype == "float16")},
        tile={
            0: Operand(("rows", "heads", slices, head_dim), "float32"),
            1: Operand(("rows", "heads", slices, 2), "float32"),
            2: Operand(("rows", columns), two_byte(dtype)),
        },
    )
