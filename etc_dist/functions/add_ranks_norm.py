"""RMSNorm of a sum over ranks; CUDA half in `kernels/functions/add_ranks_norm.cuh`."""

from __future__ import annotations

from typing import Any

import numpy as np

from etc_dist.functions.add_partials import sum_in_order
from etc_dist.functions.matmul import two_byte
from etc_dist.functions.rms_norm import normalized
from etc_dist.ir import DeviceFunction, Extent, Operand
from etc_dist.ir.function import TENSOR
from etc_dist.ir.operand import WORLD


def add_ranks_norm(dtype: str, eps: float) -> DeviceFunction:
    """parts [world, rows, columns], residual [rows, columns], gain [columns] -> the sum
    of the parts, in rank order, and the residual, rounded, and its RMSNorm, both [rows,
    columns]. The sum may be written in place of the residual. On GPUs one row."""

    def body(parts: Any, residual: Any, gain: Any, total: Any, y: Any) -> None:
        sums = sum_in_order(parts) + residual.astype(np.float32)
        total[...] = sums.astype(total.dtype)
        y[...] = normalized(total, gain, eps).astype(y.dtype)

    columns, element = Extent(name="columns", multiple=8, begins=8), two_byte(dtype)
    row = Operand((1, columns), element, leading=True)
    return DeviceFunction(
        name="add_ranks_norm",
        body=body,
        source="functions/add_ranks_norm.cuh",
        lane=TENSOR,
        reads=3,
        writes=2,
        constants={"kEps": float(eps), "kIsHalf": int(dtype == "float16")},
        tile={
            0: Operand((WORLD, 1, columns), element),
            1: row,
            2: Operand((columns,), element, leading=True),
            3: row,
            4: row,
        },
    )
