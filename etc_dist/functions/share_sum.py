"""Sums of parts into the memory of several ranks; CUDA half in
`kernels/functions/share_sum.cuh`."""

from __future__ import annotations

from typing import Any

import numpy as np

from etc_dist.functions.add_partials import sum_in_order
from etc_dist.functions.weight_layouts import two_byte
from etc_dist.ir import DeviceFunction, Extent, Operand
from etc_dist.ir.function import TENSOR

THREAD_BYTES = 128
"""About so many bytes of a thread's loads are in flight."""


def share_sum(
    dtype: str,
    parts: int,
    copies: int = 1,
    *,
    result: str = "",
    has_residual: bool = False,
    lane: str = TENSOR,
) -> DeviceFunction:
    """parts [parts, columns] of `dtype` -> their sum [columns], in order, in fp32,
    rounded once to `result`, in each of `copies` places: this rank's memory, or peers'.
    The sum of one part [columns] of the same dtype has its bits. Places may be that of
    the part itself, if it is one.

    dtype: bfloat16, float16 or float32; result: the same, or another where one of both
    is float32. has_residual: the second read [columns] of `result` is added last. On
    GPUs columns, and the index of the first one, are multiples of 8."""
    result = result or dtype
    is_copy = parts == 1 and dtype == result and not has_residual

    def body(x: Any, *operands: Any) -> None:
        ys = operands[has_residual:]
        total = x
        if not is_copy:
            total = sum_in_order(x if parts > 1 else x[None])
        if has_residual:
            total = total + operands[0].astype(np.float32)
        total = total.astype(ys[0].dtype)
        for y in ys:
            y[...] = total

    columns = Extent(name="columns", multiple=8, begins=8)
    size = (parts, columns) if parts > 1 else (columns,)
    row = Operand((columns,), _element(result), leading=True)
    tile = {n: row for n in range(1, 1 + has_residual + copies)}
    return DeviceFunction(
        name="share_sum",
        body=body,
        source="functions/share_sum.cuh",
        lane=lane,
        reads=1 + has_residual,
        writes=copies,
        constants={
            "kParts": parts,
            "kCopies": copies,
            "kIsCopy": int(is_copy),
            "kIsHalf": int("float16" in (dtype, result)),
            "kThreadBytes": THREAD_BYTES,
        },
        tile={0: Operand(size, _element(dtype), leading=True), **tile},
    )


def _element(dtype: str) -> str:
    return dtype if dtype == "float32" else two_byte(dtype)
