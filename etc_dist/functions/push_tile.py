"""The transfer of some columns of rows; CUDA half in
`kernels/functions/push_tile.cuh`."""

from __future__ import annotations

from typing import Any

from etc_dist.functions.add_partials import vector_columns
from etc_dist.ir import DeviceFunction, Operand
from etc_dist.ir.function import TRANSFER


def _push_tile(x: Any, y: Any) -> None:
    y[...] = x


def push_tile(dtype: str) -> DeviceFunction:
    """A region [rows, columns] of a tensor of `dtype` -> a copy in this rank's memory
    or a peer's, apart from it. On GPUs columns and the index of the first one are
    multiples of 8. `push_rows` is for regions that are contiguous in memory."""
    size = ("rows", vector_columns(dtype))
    return DeviceFunction(
        name="push_tile",
        body=_push_tile,
        source="functions/push_tile.cuh",
        lane=TRANSFER,
        reads=1,
        writes=1,
        tile={
            0: Operand(size, dtype, leading=True, apart=True),
            1: Operand(size, dtype, leading=True),
        },
    )
