"""A small graph across ranks, made of what both backends can run."""

from __future__ import annotations

from etc_dist.functions.push_rows import push_rows
from etc_dist.ir import Graph, graph_function, tile


@graph_function
def ring(g: Graph, *, notifies: bool = True, wanted: int | None = None) -> None:
    """y is the previous rank's x; a tile waits for `wanted` notifications, or for as
    many as element 0 of `count` says."""
    rows = g.dims("rows")
    tiles = g.let("tiles", rows // 4)
    x = g.input("x", (rows, 8), "float32")
    count = g.input("count", (4,), "int32")
    y = g.output("y", (rows, 8), "float32")
    box = g.symmetric("box", (rows, 8), "float32")
    expects = count.load(0) if wanted is None else wanted
    here = g.events("here", (tiles,), expects=expects, cross_rank=True)
    following = (g.rank + 1) % g.world_size
    (i,) = grid = g.grid(i=tiles)
    g.call(
        push_rows(),
        grid,
        name="send",
        reads=[x[tile(i, 4), :]],
        writes=[box.on(following)[tile(i, 4), :]],
        notifies=[here.on(following)[i]] if notifies else [],
    )
    g.call(
        push_rows(),
        grid,
        name="take",
        reads=[box[tile(i, 4), :]],
        writes=[y[tile(i, 4), :]],
        waits=[here[i]],
    )
