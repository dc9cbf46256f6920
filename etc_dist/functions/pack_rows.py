"""Copying chosen rows to adjacent places; CUDA half in
`kernels/functions/pack_rows.cuh`."""

from __future__ import annotations

from typing import Any

from etc_dist.functions.weight_layouts import two_byte
from etc_dist.ir import DeviceFunction, Extent, Operand
from etc_dist.ir.function import TRANSFER

PACKED_ROWS = 4
"""Rows of a task of the transfer lane: few, since one warp copies them in sequence."""
TENSOR_ROWS = 8
"""Rows of a task of the tensor lane: one for each warp."""


def pack_rows(dtype: str, lane: str = TRANSFER) -> DeviceFunction:
    """x [tokens, columns] of `dtype`, numbers [rows] (int32) -> packed [rows, columns]:
    the rows of x with these numbers. On GPUs columns are a multiple of 8."""

    def body(x: Any, numbers: Any, packed: Any) -> None:
        packed[...] = x[numbers]

    columns, element = Extent(name="columns", multiple=8, begins=8), two_byte(dtype)
    return DeviceFunction(
        name="pack_rows",
        body=body,
        source="functions/pack_rows.cuh",
        lane=lane,
        reads=2,
        writes=1,
        gathers=(0,),
        tile={
            0: Operand((Extent(begins=0), columns), element),
            1: Operand(("rows",), "int32"),
            2: Operand(("rows", columns), element, leading=True),
        },
    )
