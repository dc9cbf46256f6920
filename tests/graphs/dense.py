"""Matmuls on tiles of one shape, for graphs whose subject is another one. Each is made
for a graph: the function, and `values=` of its calls."""

from __future__ import annotations

from typing import Any

from etc_dist.functions.epilogue import Epilogue, store
from etc_dist.functions.tile_matmul import Tiles
from etc_dist.functions.tile_shape import TileShape
from etc_dist.functions.wide_tile import WIDE, RowTiles
from etc_dist.ir import DeviceFunction, Expr, Graph

SINGLE = TileShape(128, 128)
Values = dict[str, Expr]


def dense(
    g: Graph,
    shape: TileShape = SINGLE,
    dtype: str = "bfloat16",
    w_layout: str = "nk",
    name: str = "dense",
    epilogue: Epilogue = store,
) -> tuple[DeviceFunction, Values]:
    """x @ w.T, or x @ w, for regions of the shape."""
    tiles = Tiles(g, name, 0, [shape], w_layout=w_layout)
    return tiles.matmul(dtype, epilogue), tiles.values


def own_rows(
    g: Graph,
    epilogue: Epilogue = store,
    *,
    most_rows: int = WIDE.rows,
    w_layout: str = "nk",
    in_order: bool = False,
    dtype: str = "bfloat16",
    name: str = "rows",
    **options: Any,
) -> tuple[DeviceFunction, Values]:
    """The rows of each task, up to `most_rows`, by 256 columns, or by 128 of few rows
    or scaled weights."""
    tiles = RowTiles(g, name, most_rows, w_layout=w_layout, in_order=in_order)
    return tiles.matmul_rows(dtype, epilogue, **options), tiles.values
