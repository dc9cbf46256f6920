"""Copying a row to several places; CUDA half in `kernels/functions/scatter_row.cuh`."""

from __future__ import annotations

from typing import Any

from etc_dist.functions.weight_layouts import two_byte
from etc_dist.ir import DeviceFunction, Extent, Operand
from etc_dist.ir.function import TRANSFER


def scatter_row(copies: int, dtype: str) -> DeviceFunction:
    """x [1, columns] of `dtype` -> `copies` regions, each a copy [1, columns], or empty
    [0, columns]. On GPUs columns are a multiple of 8, and no region overlaps x."""

    def body(x: Any, *places: Any) -> None:
        for place in places:
            place[...] = x[: len(place)]

    columns = Extent(name="columns", multiple=8, begins=8)
    element = two_byte(dtype)
    tile = {0: Operand((1, columns), element, apart=True)}
    place = Operand((Extent(most=1), columns), element)
    return DeviceFunction(
        name="scatter_row",
        body=body,
        source="functions/scatter_row.cuh",
        lane=TRANSFER,
        reads=1,
        writes=copies,
        tile=tile | dict.fromkeys(range(1, copies + 1), place),
    )
