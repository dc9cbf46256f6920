"""Sums of fp32 partial results; CUDA half in `kernels/functions/add_partials.cuh`.

Partial results, of ranks, are added in order."""

from __future__ import annotations

from typing import Any

import numpy as np

from etc_dist.functions.weight_layouts import two_byte
from etc_dist.ir import DeviceFunction, Extent, Operand
from etc_dist.ir.function import TRANSFER


def _add(partials: Any, y: Any) -> None:
    y[...] = sum_in_order(partials).astype(y.dtype)


def sum_in_order(partials: Any) -> Any:
    """The sum over the first axis, in order, in fp32."""
    total = np.zeros(partials.shape[1:], np.float32)
    for partial in partials:
        total += partial.astype(np.float32)
    return total


def vector_columns(dtype: str) -> Extent:
    """Columns in vectors of 8, also at the end of a row."""
    return Extent(name="columns", multiple=8, begins=8)


def add_partials(dtype: str) -> DeviceFunction:
    """fp32 partials [n, rows, columns] -> their sum [rows, columns] in `dtype`, in this
    rank's memory or in a peer's. On GPUs columns are multiples of 8."""
    result = dtype if dtype == "float32" else two_byte(dtype)
    return DeviceFunction(
        name="add_partials",
        body=_add,
        source="functions/add_partials.cuh",
        lane=TRANSFER,
        reads=1,
        writes=1,
        constants={"kIsHalf": int(dtype == "float16")},
        tile={
            0: Operand(
                (None, "rows", vector_columns("float32")), "float32", apart=True
            ),
            1: Operand(("rows", vector_columns(dtype)), result, leading=True),
        },
    )
