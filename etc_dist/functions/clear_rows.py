"""Zeros in rows; CUDA half in `kernels/functions/clear_rows.cuh`."""

from __future__ import annotations

from typing import Any

from etc_dist.functions.weight_layouts import two_byte
from etc_dist.ir import DeviceFunction, Extent, Operand
from etc_dist.ir.function import TENSOR


def clear_rows(dtype: str) -> DeviceFunction:
    """Writes y [rows, columns] of `dtype`: zeros. On GPUs columns are a multiple of
    8."""

    def body(y: Any) -> None:
        y[...] = 0

    columns = Extent(multiple=8, begins=8)
    return DeviceFunction(
        name="clear_rows",
        body=body,
        source="functions/clear_rows.cuh",
        lane=TENSOR,
        reads=0,
        writes=1,
        tile={0: Operand((None, columns), two_byte(dtype))},
    )
