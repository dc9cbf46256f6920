"""Sums of pieces of tiles; CUDA half in `kernels/functions/sum_pieces.cuh`."""

from __future__ import annotations

from typing import Any

from etc_dist.functions.add_partials import sum_in_order
from etc_dist.functions.weight_layouts import two_byte
from etc_dist.ir import DeviceFunction, Extent, Operand
from etc_dist.ir.function import TRANSFER


def _sum_pieces(pieces: Any, y: Any) -> None:
    total = sum_in_order(pieces)[: y.shape[0], : y.shape[1]]
    y[: total.shape[0], : total.shape[1]] = total.astype(y.dtype)


def sum_pieces(dtype: str, result: str) -> DeviceFunction:
    """pieces [n, rows, columns] of `dtype` -> their sum [rows, columns] in `result`, in
    order, in fp32, rounded once. If the sizes differ, only the elements that both sides
    have are summed. On GPUs columns are multiples of 8.

    dtype: bfloat16, float16 or float32; result: the same, or another where dtype is
    float32."""
    piece = (None, Extent(multiple=8, begins=8))
    return DeviceFunction(
        name="sum_pieces",
        body=_sum_pieces,
        source="functions/sum_pieces.cuh",
        lane=TRANSFER,
        reads=1,
        writes=1,
        constants={"kIsHalf": int("float16" in (dtype, result))},
        tile={
            0: Operand((None, *piece), _element(dtype)),
            1: Operand(piece, _element(result), leading=True),
        },
    )


def _element(dtype: str) -> str:
    return dtype if dtype == "float32" else two_byte(dtype)
