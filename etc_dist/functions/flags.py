"""Sums over ranks by flagged words; CUDA half in `kernels/functions/flags.cuh`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from etc_dist.functions.matmul import two_byte
from etc_dist.ir import DeviceFunction, Extent, Operand
from etc_dist.ir.function import TENSOR

COLUMNS = Extent(name="columns", multiple=8, begins=8)


def push_flagged(dtype: str, copies: int) -> DeviceFunction:
    """x [columns] -> the same in each of `copies` flagged tensors, of peers. On GPUs
    columns, and the index of the first one, are multiples of 8."""

    def body(x: Any, *copies: Any) -> None:
        for copy in copies:
            copy[...] = x

    row = Operand((COLUMNS,), two_byte(dtype), leading=True)
    flagged = Operand((COLUMNS,), two_byte(dtype), leading=True, flagged=True)
    return _function(
        "push_flagged",
        dtype,
        body,
        {0: row, **{1 + n: flagged for n in range(copies)}},
        copies,
        {"kCopies": copies},
    )


def add_flagged(dtype: str) -> DeviceFunction:
    """x [columns], flagged parts [world, columns] -> the sum of the parts of all ranks
    in rank order, in fp32, rounded once, where x is this rank's part, and its row of
    parts is not read. y may be x. On GPUs as `push_flagged`."""

    def body(x: Any, parts: Any, y: Any, *, rank: int) -> None:
        total = np.zeros(x.shape, np.float32)
        for number, part in enumerate(parts):
            total += (x if number == rank else part).astype(np.float32)
        y[...] = total.astype(y.dtype)

    row = Operand((COLUMNS,), two_byte(dtype), leading=True)
    parts = Operand(("world", COLUMNS), two_byte(dtype), flagged=True)
    tile = {0: row, 1: parts, 2: row}
    return _function("add_flagged", dtype, body, tile, 1, {}, gathers=[1])


def _function(
    name: str,
    dtype: str,
    body: Any,
    tile: dict[int, Operand],
    writes: int,
    constants: dict[str, int],
    gathers: Sequence[int] = (),
) -> DeviceFunction:
    return DeviceFunction(
        name=name,
        body=body,
        source="functions/flags.cuh",
        lane=TENSOR,
        reads=len(tile) - writes,
        writes=writes,
        gathers=gathers,
        constants={"kIsHalf": int(dtype == "float16"), **constants},
        tile=tile,
    )
