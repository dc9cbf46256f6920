"""Rows that travel around a ring of ranks."""

from __future__ import annotations

from functools import partial

from etc_dist.functions.push_rows import push_rows
from etc_dist.ir import DeviceFunction, Graph, device_function, graph_function, tile


@graph_function
def ring(
    g: Graph,
    *,
    notifies: bool = True,
    num_expected: int | None = None,
    send: DeviceFunction | None = None,
    take: DeviceFunction | None = None,
    columns: tuple[int, ...] = (8,),
) -> None:
    """y is what `take` makes of the previous rank's x, which `send` has sent, in tiles
    of four rows; by default copies. A tile waits for `num_expected` notifications, or
    for as many as element 0 of `count` says."""
    rows = g.dims("rows")
    num_tiles = g.let("tiles", rows // 4)
    x = g.input("x", (rows, *columns), "float32")
    count = g.input("count", (4,), "int32")
    y = g.output("y", (rows, *columns), "float32")
    box = g.symmetric("box", (rows, *columns), "float32")
    expects = count.load(0) if num_expected is None else num_expected
    here = g.events("here", (num_tiles,), expects=expects, cross_rank=True)
    following = (g.rank + 1) % g.world_size
    (i,) = grid = g.grid(i=num_tiles)
    region = (tile(i, 4), *(slice(None) for _ in columns))
    there = {"writes": [box.on(following)[region]]}
    there["notifies"] = [here.on(following)[i]] if notifies else []
    g.call(send or push_rows(), grid, name="send", reads=[x[region]], **there)
    here_too = {"writes": [y[region]], "waits": [here[i]]}
    g.call(take or push_rows(), grid, name="take", reads=[box[region]], **here_too)


@device_function(source="", reads=1, writes=1, lane="transfer")
def copy(x, box):
    box[...] = x


@device_function(source="", reads=1, writes=1)
def double(box, y):
    y[...] = 2 * box


doubled_ring = partial(ring, num_expected=1, send=copy, take=double, columns=())
"""By bodies of NumPy alone: y [rows] is twice the previous rank's x."""
