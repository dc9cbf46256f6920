"""RMSNorm of a sum over ranks; CUDA half in `kernels/functions/add_ranks_norm.cuh`."""

from __future__ import annotations

from typing import Any

import numpy as np

from etc_dist.functions.add_partials import sum_in_order
from etc_dist.functions.rms_norm import column_operand, normalized
from etc_dist.functions.weight_layouts import two_byte
from etc_dist.ir import DeviceFunction, Extent, Operand
from etc_dist.ir.function import TENSOR
from etc_dist.ir.operand import WORLD


def add_ranks_norm(dtype: str, eps: float, *, has_bias: bool = False) -> DeviceFunction:
    """parts [world, rows, columns], with `has_bias` also a bias [columns], residual
    [rows, columns], gain [columns] -> the sum of the parts, in rank order, of the bias
    and the residual, rounded, and its RMSNorm, both [rows, columns], all of `dtype`.
    The sum may be written in place of the residual. On GPUs one row."""

    def body(parts: Any, *arrays: Any) -> None:
        *bias, residual, gain, total, y = arrays
        sums = sum_in_order(parts)
        for addend in (*bias, residual):
            sums = sums + addend.astype(np.float32)
        total[...] = sums.astype(total.dtype)
        y[...] = normalized(total, gain, eps).astype(y.dtype)

    columns, element = Extent(name="columns", multiple=8, begins=8), two_byte(dtype)
    row = Operand((1, columns), element, leading=True)
    parts = Operand((WORLD, 1, columns), element)
    column = column_operand(dtype)
    operands = [parts, *([column] * has_bias), row, column, row, row]
    return DeviceFunction(
        name="add_ranks_norm",
        body=body,
        source="functions/add_ranks_norm.cuh",
        lane=TENSOR,
        reads=3 + has_bias,
        writes=2,
        constants={
            "kEps": float(eps),
            "kIsHalf": int(dtype == "float16"),
            **({"kHasBias": 1} if has_bias else {}),
        },
        tile=dict(enumerate(operands)),
    )
