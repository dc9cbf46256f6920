"""A matmul on tiles of one shape, for graphs whose subject is another one."""

from __future__ import annotations

from etc_dist.functions.tile_matmul import Tiles
from etc_dist.functions.tile_shape import TileShape
from etc_dist.ir import DeviceFunction, Expr, Graph

SINGLE = TileShape(128, 128)


def dense(
    g: Graph,
    shape: TileShape = SINGLE,
    dtype: str = "bfloat16",
    w_layout: str = "nk",
    name: str = "dense",
) -> tuple[DeviceFunction, dict[str, Expr]]:
    """A function of x @ w.T, or of x @ w, for regions of the shape, and `values=`."""
    tiles = Tiles(g, name, 0, [shape], w_layout=w_layout)
    return tiles.matmul(dtype), tiles.values
