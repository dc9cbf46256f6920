"""A column of ones next to a matrix, by which the biases of another one are multiplied,
or zeros; CUDA half in `kernels/functions/ones_column.cuh`."""

from __future__ import annotations

from typing import Any

from etc_dist.functions.weight_layouts import two_byte
from etc_dist.ir import DeviceFunction, Extent, Operand
from etc_dist.ir.function import TENSOR


def ones_column(dtype: str, first: int = 1) -> DeviceFunction:
    """Writes y [rows, columns] of `dtype`: `first`, 1 or 0, in the first column, else
    0. On GPUs columns are a multiple of 8."""

    def body(y: Any) -> None:
        y[...] = 0
        y[:, 0] = first

    columns = Extent(multiple=8, begins=8)
    return DeviceFunction(
        name="ones_column",
        body=body,
        source="functions/ones_column.cuh",
        lane=TENSOR,
        reads=0,
        writes=1,
        constants={"kIsHalf": int(dtype == "float16"), "kFirst": first},
        tile={0: Operand((None, columns), two_byte(dtype))},
    )
