"""Sums over ranks by flagged words; CUDA half in `kernels/functions/flags.cuh`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from etc_dist.functions.rms_norm import normalized
from etc_dist.functions.weight_layouts import two_byte
from etc_dist.ir import DeviceFunction, Extent, Operand
from etc_dist.ir.function import TENSOR

COLUMNS = Extent(name="columns", multiple=8, begins=8)


def push_flagged(dtype: str, copies: int, *, is_row: bool = False) -> DeviceFunction:
    """x [columns] -> the same in each of `copies` flagged tensors, of peers, all of
    `dtype`. On GPUs columns, and the index of the first one, are multiples of 8.
    is_row: of all, a row [1, columns], or none beyond the tensor's end."""

    def body(x: Any, *copies: Any) -> None:
        for copy in copies:
            copy[...] = x

    size = (1, COLUMNS) if is_row else (COLUMNS,)
    row = Operand(size, two_byte(dtype), leading=True)
    flagged = Operand(size, two_byte(dtype), leading=True, flagged=True)
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
        for part_rank, part in enumerate(parts):
            total += (x if part_rank == rank else part).astype(np.float32)
        y[...] = total.astype(y.dtype)

    row = Operand((COLUMNS,), two_byte(dtype), leading=True)
    parts = Operand(("world", COLUMNS), two_byte(dtype), flagged=True)
    tile = {0: row, 1: parts, 2: row}
    return _function("add_flagged", dtype, body, tile, 1, {}, gathers=[1])


def add_flagged_norm(dtype: str, eps: float) -> DeviceFunction:
    """x [1, columns], flagged parts [world, 1, columns], residual [1, columns], gain
    [columns] -> the sum of the parts of all ranks, as `add_flagged`, and the residual,
    rounded, and its RMSNorm, both [1, columns], in this order. They may be written in
    place of the residual and x. Beyond the tensors' end nothing is done."""

    def body(
        x: Any, parts: Any, residual: Any, gain: Any, total: Any, y: Any, *, rank: int
    ) -> None:
        sums = np.zeros(x.shape, np.float32)
        for part_rank, part in enumerate(parts):
            sums += (x if part_rank == rank else part).astype(np.float32)
        total[...] = (sums + residual.astype(np.float32)).astype(total.dtype)
        y[...] = normalized(total, gain, eps).astype(y.dtype)

    row = Operand((1, COLUMNS), two_byte(dtype), leading=True)
    parts = Operand(("world", 1, COLUMNS), two_byte(dtype), flagged=True)
    column = Operand((COLUMNS,), two_byte(dtype), leading=True)
    return _function(
        "add_flagged_norm",
        dtype,
        body,
        dict(enumerate([row, parts, row, column, row, row])),
        2,
        {"kEps": float(eps)},
        gathers=[1],
    )


def _function(
    name: str,
    dtype: str,
    body: Any,
    tile: dict[int, Operand],
    num_writes: int,
    constants: dict[str, int | float],
    gathers: Sequence[int] = (),
) -> DeviceFunction:
    return DeviceFunction(
        name=name,
        body=body,
        source="functions/flags.cuh",
        lane=TENSOR,
        reads=len(tile) - num_writes,
        writes=num_writes,
        gathers=gathers,
        constants={"kIsHalf": int(dtype == "float16"), **constants},
        tile=tile,
    )
