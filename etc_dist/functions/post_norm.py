"""RMSNorm of what is added to a residual; CUDA half in
`kernels/functions/post_norm.cuh`.

Layers with norms after attention and after the MLP (OLMo 2, Gemma 3, GLM-4)."""

from __future__ import annotations

from typing import Any

import numpy as np

from etc_dist.functions.add_partials import sum_in_order
from etc_dist.functions.rms_norm import column_operand, gain_offset, normalized
from etc_dist.functions.weight_layouts import two_byte
from etc_dist.ir import DeviceFunction, Extent, Operand
from etc_dist.ir.function import TENSOR
from etc_dist.ir.operand import WORLD


def post_norm(
    dtype: str,
    eps: float,
    *,
    has_bias: bool = False,
    normalizes_sum: bool = True,
    offset: int = 0,
) -> DeviceFunction:
    """x [rows, columns], with `has_bias` also a bias [columns], residual [rows,
    columns], post_gain and gain [columns] -> total, the residual and the RMSNorm of x
    with post_gain, rounded; and y, the RMSNorm of total with gain, both [rows,
    columns], all of `dtype`. Without `normalizes_sum` there is no gain, and y = total.
    total may be written in place of the residual. offset: is added to both gains. On
    GPUs one row."""
    return _function("post_norm", dtype, eps, has_bias, normalizes_sum, offset)


def post_ranks_norm(
    dtype: str,
    eps: float,
    *,
    has_bias: bool = False,
    normalizes_sum: bool = True,
    offset: int = 0,
) -> DeviceFunction:
    """As `post_norm`, where x is the sum of parts [world, rows, columns] in rank
    order."""
    return _function("post_ranks_norm", dtype, eps, has_bias, normalizes_sum, offset)


def _function(
    name: str,
    dtype: str,
    eps: float,
    has_bias: bool,
    normalizes_sum: bool,
    offset: int,
) -> DeviceFunction:
    is_sum = name == "post_ranks_norm"

    def body(x: Any, *arrays: Any) -> None:
        *bias, residual, post_gain = arrays[: has_bias + 2]
        *gain, total, y = arrays[has_bias + 2 :]
        x = sum_in_order(x) if is_sum else x.astype(np.float32)
        for row_bias in bias:
            x = x + row_bias.astype(np.float32)
        x = x.astype(residual.dtype)  # as if it was stored
        sums = normalized(x, post_gain, eps, offset) + residual.astype(np.float32)
        total[...] = sums.astype(total.dtype)
        y[...] = total
        for row_gain in gain:
            y[...] = normalized(total, row_gain, eps, offset).astype(y.dtype)

    columns, element = Extent(name="columns", multiple=8, begins=8), two_byte(dtype)
    row = Operand((1, columns), element, leading=True)
    x = Operand((WORLD, 1, columns), element) if is_sum else row
    column = column_operand(dtype)
    gains = [column] * (1 + normalizes_sum)
    operands = [x, *([column] * has_bias), row, *gains, row, row]
    return DeviceFunction(
        name=name,
        body=body,
        source="functions/post_norm.cuh",
        lane=TENSOR,
        reads=len(operands) - 2,
        writes=2,
        constants={
            "kEps": float(eps),
            "kIsHalf": int(dtype == "float16"),
            "kHasBias": int(has_bias),
            "kNormalizesSum": int(normalizes_sum),
            **gain_offset(offset),
        },
        tile=dict(enumerate(operands)),
    )
