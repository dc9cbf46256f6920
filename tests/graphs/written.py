"""The graphs with golden texts: both ops, and small graphs of a user."""

from __future__ import annotations

from functools import partial

from etc_dist.functions.tile_shape import TileShape
from etc_dist.ir import (
    DeviceFunction,
    Graph,
    GraphFunction,
    device_function,
    graph_function,
    minimum,
    span,
    tile,
)
from etc_dist.ir.function import TENSOR, TRANSFER
from etc_dist.ops.all_gather_matmul import all_gather_matmul_graph
from etc_dist.ops.matmul_reduce_scatter import matmul_reduce_scatter_graph
from tests.graphs.calls import Task, calls
from tests.graphs.dense import SINGLE, dense


@device_function(
    source="user/scale.cuh", reads=2, writes=1, lane=TENSOR, constants={"kFactor": 3}
)
def scale(x, table, box):
    box[...] = 3 * x


@device_function(source="user/take.cuh", reads=1, writes=1, lane=TRANSFER)
def take(box, y):
    y[...] = box


@graph_function
def tripled_ring(g: Graph) -> None:
    """y = 3 * the previous rank's x; the tiles to wait for are an input."""
    n = g.dims("n")
    num_tiles = g.let("tiles", n // 4)
    x = g.input("x", (n, 8), "float16")
    table = g.input("table", (4,), "int32")
    y = g.output("y", (n, 8), "float16")
    box = g.symmetric("box", (n, 8), "float16")
    here = g.events(
        "here",
        (num_tiles, 2),
        expects=lambda i, part: minimum(table.load(part), 1),
        cross_rank=True,
    )
    tile_event = g.events("done", (1,), expects=num_tiles)
    following = (g.rank + 1) % g.world_size
    (i,) = grid = g.grid(i=num_tiles)
    g.call(
        scale,
        grid,
        reads=[x[tile(i, 4), :], table[:]],
        writes=[box.on(following)[tile(i, 4), :]],
        notifies=[here.on(following)[i, part] for part in (0, 1)],
        order=lambda t: (num_tiles - 1 - t,),
        pace=n * 2,
    )
    g.call(
        take,
        grid,
        reads=[box[tile(i, 4), :]],
        writes=[y[tile(i, 4), :]],
        waits=[here[i, 0], here[i, 1]],
        notifies=[tile_event[0]],
    )


@graph_function
def scattered(g: Graph) -> None:
    """A call with every kind of load in its maps."""
    n = g.dims("n")
    at = g.input("at", (n, 2), "int32")
    table = g.local("table", (n,), "int32")
    x = g.input("x", (n, 4), "float32")
    box = g.symmetric("box", (n, 4), "float32")
    free = g.events("free", (n,), expects=1)
    count_events = g.events("counted", (n, 2), expects=lambda i, k: table.load(i) + k)
    here = g.events("here", (n,), expects=1, cross_rank=True)
    (i,) = grid = g.grid(i=n)
    g.call(
        DeviceFunction("scatter", print, "user/scatter.cuh", TENSOR, 2, 1),
        grid,
        reads=[
            x[table.load(at.load(i, 0)), span(1, table.load(i))],
            x[span(at.load(i, 1), n), span(4 * i, 4)],
        ],
        writes=[box.on(at.load(i, 1))[span(table.load(0) // table.load(i), 1), :]],
        waits=[count_events[table.load(i) - 1, minimum(i, 1)], free[i]],
        notifies=[here.on(at.load(0, 0))[at.load(i, 1)], count_events[i, 0]],
    )


def three_matmuls(world_size: int) -> GraphFunction:
    """y[i] = x @ w.T by three functions with stages and tiles of different sizes, and
    by one as the first again."""
    narrow = TileShape(64, 64, swapped=True)
    tasks = []
    for matmul_idx, (name, shape, w_layout) in enumerate(
        [("nk", SINGLE, "nk"), ("kn", SINGLE, "kn"), ("narrow", narrow, "nk"),
         ("again", SINGLE, "nk")]
    ):  # fmt: skip
        rows, columns = f"rows/{shape.rows}", f"n/{shape.columns}"
        w = f"w {columns} k" if w_layout == "nk" else f"w_kn k {columns}"
        operands = [f"x {rows} k bfloat16", f"{w} bfloat16"]
        function = partial(dense, shape=shape, w_layout=w_layout, name=name)
        y = f"y 4[{matmul_idx}] {rows} {columns} bfloat16"
        tasks.append(Task(function, operands, [y], name=name))
    return calls(world_size, tasks=tasks, dims="rows n k")


TILES = (TileShape(160, 128, swapped=True), TileShape(128, 256))
GRAPHS: dict[str, GraphFunction] = {
    "matmul_reduce_scatter": matmul_reduce_scatter_graph(2, shapes=TILES),
    "all_gather_matmul": all_gather_matmul_graph(2, shapes=TILES),
    "user": tripled_ring(2),
    "scattered": scattered(2),
}
RANK_TILES = {"shape": 0, "column_groups": 16, "split_tile_columns": 3, "parts": 4}
DIMS: dict[str, dict[str, int]] = {
    "matmul_reduce_scatter": {"rows": 1000, "n": 4096, "k": 1792, **RANK_TILES},
    "all_gather_matmul": {"rows": 1000, "n": 4096, "k": 1792, **RANK_TILES},
    "user": {"n": 32},
    "scattered": {"n": 3},
}
