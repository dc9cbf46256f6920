"""The largest number of each row, for greedy decoding; CUDA half in
`kernels/functions/best_column.cuh`.

Rows are divided into tiles of columns, each a task of `best_column`; `next_token` takes
the best of these, and prepares the rows for their next step. Of equal numbers the first
one counts. A NaN is larger than all numbers, so that the largest number of a row is
finite if and only if the row has a finite number, no NaN and no +inf."""

from __future__ import annotations

from typing import Any

import numpy as np

from etc_dist.functions.weight_layouts import two_byte
from etc_dist.ir import (
    DeviceFunction,
    Expr,
    Extent,
    Operand,
    Region,
    Tensor,
    maximum,
    minimum,
    span,
)
from etc_dist.ir.function import TENSOR

NO_TOKEN, NOT_FINITE = -1, -2
"""The token of a row that has no step, and of one whose largest number is not finite.
"""


def best_column(dtype: str) -> DeviceFunction:
    """x [rows, columns], a tile of `dtype` -> values [rows] in fp32, ids [rows]
    (int32): the largest number of each row, and its column in the tile, which is
    undefined for a NaN. -inf and 0 for a tile without columns."""

    def body(x: Any, values: Any, ids: Any) -> None:
        ids[...], values[...] = largest(x.astype(np.float32))

    element = dtype if dtype == "float32" else two_byte(dtype)
    # NOTE: vectors are read up to a multiple of 8 columns, which the tensor has.
    reads = Operand(("rows", Extent(begins=8)), element)
    tile = dict(enumerate([reads, *best_of_rows()]))
    return _function("best_column", body, dtype, tile, 1, num_reads=1)


def next_token(columns: int) -> DeviceFunction:
    """values and ids [rows, tiles] of tiles of `columns`, position and end [rows], stop
    [rows, stops] -> tokens and next_position [rows] (int32).

    A row with a position below 0 has no step: its token is NO_TOKEN. The token of
    another row is the column of its largest number. Its next position is -1, which ends
    the row, if it would reach `end` or the token is in `stop`; else the position after
    its own.

    If the largest number of a row with a step is not finite, its token is NOT_FINITE,
    and all rows end."""

    def body(
        values: Any, ids: Any, position: Any, end: Any, stop: Any, *to: Any
    ) -> None:
        tokens, next_position = to
        tiles, _ = largest(values)
        best = tiles * columns + ids[np.arange(len(ids)), tiles]
        finite = np.isfinite(values[np.arange(len(ids)), tiles])
        best = np.where(position < 0, NO_TOKEN, np.where(finite, best, NOT_FINITE))
        tokens[...] = best
        ends = (position < 0) | (position + 1 >= end)
        ends |= (stop == best[:, None]).any(axis=1) | (best == NOT_FINITE).any()
        next_position[...] = np.where(ends, -1, position + 1)

    row = Operand(("rows",), "int32", leading=True)
    tile = _of_tiles() | dict.fromkeys((2, 3, 5, 6), row)
    tile[4] = Operand(("rows", Extent(whole=True)), "int32")
    return _function("next_token", body, "float32", tile, columns, num_reads=5)


def best_on_rank(columns: int) -> DeviceFunction:
    """values and ids [rows, tiles] of tiles of `columns` -> the largest number of each
    row, and its column [rows] (int32), plus the dim or number `first`."""

    def body(values: Any, ids: Any, best: Any, best_ids: Any, *, first: int) -> None:
        tiles, best[...] = largest(values)
        best_ids[...] = first + tiles * columns + ids[np.arange(len(ids)), tiles]

    tile = dict(enumerate([*_of_tiles().values(), *best_of_rows()]))
    return _function("best_on_rank", body, "float32", tile, columns, num_reads=2)


def unpadded_tile(x: Tensor, j: Expr, width: int, count: Expr) -> Region:
    """Tile j, of `width` columns, of the first `count` columns of x. The last tiles may
    have fewer columns, or none."""
    num_columns = maximum(0, count - j * width)
    return x[:, span(j * width, minimum(width, num_columns))]


def best_of_rows() -> list[Operand]:
    """The largest number of each row, and its column: columns of two matrices."""
    return [Operand(("rows", 1), dtype) for dtype in ("float32", "int32")]


def _of_tiles() -> dict[int, Operand]:
    return {
        0: Operand(("rows", "tiles"), "float32"),
        1: Operand(("rows", "tiles"), "int32"),
    }


def largest(x: Any) -> tuple[Any, Any]:
    """The column of the largest number of each row, and this number; 0 and -inf without
    columns."""
    if x.shape[1] == 0:
        return 0, -np.inf
    columns = x.argmax(axis=1)  # of a NaN, if there is one
    return columns, x[np.arange(len(x)), columns]


def _function(
    name: str,
    body: Any,
    dtype: str,
    tile: dict[int, Operand],
    columns: int,
    *,
    num_reads: int,
) -> DeviceFunction:
    return DeviceFunction(
        name=name,
        body=body,
        source="functions/best_column.cuh",
        lane=TENSOR,
        reads=num_reads,
        writes=2,
        constants={"kColumns": columns, "kIsHalf": int(dtype == "float16")},
        tile=tile,
    )
