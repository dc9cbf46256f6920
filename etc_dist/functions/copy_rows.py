"""Copies of the arrays of a step's rows; CUDA half in
`kernels/functions/copy_rows.cuh`."""

from __future__ import annotations

from typing import Any

from etc_dist.ir import DeviceFunction, Operand
from etc_dist.ir.function import TENSOR

ARRAYS = 4
"""Arrays that one task copies."""


def copy_rows() -> DeviceFunction:
    """Four arrays [rows] -> their copies [rows], all int32. Each element is read once,
    those of a row at the same time: the arrays may be in the memory of the host. A
    `push_rows` for each array takes longer."""
    first = Operand(("rows",), "int32")
    row = Operand(("rows",), "int32", leading=True)
    return DeviceFunction(
        name="copy_rows",
        body=_copy_rows,
        source="functions/copy_rows.cuh",
        lane=TENSOR,
        reads=ARRAYS,
        writes=ARRAYS,
        tile={0: first, **dict.fromkeys(range(1, 2 * ARRAYS), row)},
    )


def _copy_rows(*operands: Any) -> None:
    for array, copy in zip(operands[:ARRAYS], operands[ARRAYS:], strict=True):
        copy[...] = array
