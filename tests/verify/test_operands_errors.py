"""Operands of one task that overlap, or that the edges of tensors clip."""

from __future__ import annotations

from typing import Any

import pytest

from etc_dist.errors import GraphError
from etc_dist.functions.add_partials import add_partials
from etc_dist.functions.choose_experts import choose_experts
from etc_dist.functions.combine_slices import combine_slices
from etc_dist.functions.epilogue import row_squares, store, swiglu
from etc_dist.functions.matmul import weight_columns
from etc_dist.functions.push_rows import push_rows
from etc_dist.functions.rms_norm import rms_norm
from etc_dist.functions.router import Router
from etc_dist.functions.routing import Routing
from etc_dist.functions.tile_matmul import Tiles, TileShape
from etc_dist.ir import Graph, GraphFunction, ceildiv, graph_function, tile
from etc_dist.schedule import schedule_static
from etc_dist.verify.verify import verify
from tests.graphs.dense import SINGLE, dense


def prove(graph: GraphFunction, **dims: int) -> None:
    verify(schedule_static(graph), dims, workers=2)


@graph_function
def push_within(g: Graph, *, to: int) -> None:
    n = g.dims("n")
    state = g.state("state", (n,), "float32")
    reads, writes = [state[8:n]], [state[8 - to : n - to]]
    g.call(push_rows(), g.grid(one=1), reads=reads, writes=writes)


def test_copy_onto_a_part_of_its_source_is_refused() -> None:
    with pytest.raises(GraphError, match=r"which overlaps state\[8 \+: n - 8\]"):
        prove(push_within(1, to=4), n=64)
    prove(push_within(1, to=8), n=16)  # 8:16 to 0:8


@graph_function
def multiply_in_place(g: Graph) -> None:
    n = g.dims("n")
    x, w = g.input("x", (n, 128), "bfloat16"), g.state("w", (128, 128), "bfloat16")
    function, values = dense(g, SINGLE)
    g.call(
        function,
        g.grid(one=1),
        values=values,
        reads=[x[tile(0, 128), :], w[:, :]],
        writes=[w[:, :]],
    )


def test_matmul_over_its_weight_is_refused() -> None:
    with pytest.raises(GraphError, match=r"writes w\[:, :\], which overlaps w"):
        prove(multiply_in_place(1), n=128)


@graph_function
def clipped(g: Graph, *, partials: bool) -> None:
    n, m = g.dims("n m")
    (i,) = grid = g.grid(i=ceildiv(m, 64))
    shape: Any = (2, n, 8) if partials else (n, 8)
    x, y = g.input("x", shape, "float32"), g.output("y", (m, 8), "float32")
    rows = tile(i, 64), slice(None)
    read = x[:, rows[0], :] if partials else x[rows]
    function = add_partials("float32") if partials else push_rows()
    g.call(function, grid, reads=[read], writes=[y[rows]])


@pytest.mark.parametrize("partials", [False, True])
@pytest.mark.parametrize("m", [32, 100])
def test_regions_of_equal_sizes_that_are_clipped_differently_are_refused(
    partials, m
) -> None:
    graph = clipped(1, partials=partials)
    with pytest.raises(GraphError, match="has 16 along .* which must be equal"):
        prove(graph, n=16, m=m)
    prove(graph, n=m, m=m)


@graph_function
def picks(g: Graph) -> None:
    n, e = g.dims("n e")
    logits = g.input("logits", (n, e), "float32")
    ids, weights = (g.output(t[:3], (n, 2), t) for t in ("int32", "float32"))
    i, j = grid = g.grid(i=n, j=ceildiv(e, 8))
    to = tile(i, 1), tile(j, 2)
    g.call(
        choose_experts(Routing(8, Router(2), "bfloat16"), 1),
        grid,
        reads=[logits[tile(i, 1), tile(j, 8)]],
        writes=[ids[to], weights[to]],
    )


def test_region_that_is_smaller_than_the_constant_of_a_function_is_refused() -> None:
    prove(picks(1), n=3, e=8)
    with pytest.raises(GraphError) as caught:
        prove(picks(1), n=3, e=6)
    assert "has 6 of 8 along axis 1 of logits[i +: 1, j * 8 +: 8]" in str(caught.value)
    assert "2 more like it" in str(caught.value)


@graph_function
def combined(g: Graph) -> None:
    h, n, _cuts = g.dims("h n cuts")
    sums = g.input("sums", (4, h, 64), "float32")
    stats = g.input("stats", (4, h, 2), "float32")
    y = g.output("y", (n,), "bfloat16")
    j, *_ = grid = g.grid(j=ceildiv(h, 2))
    reads = [sums[:, tile(j, 2), :], stats[:, tile(j, 2), :]]
    function = combine_slices(64, "bfloat16")
    g.call(function, grid, reads=reads, writes=[y[tile(j, 128)]])


def test_sizes_with_a_factor_are_compared() -> None:
    prove(combined(1), h=3, n=192, cuts=1)
    with pytest.raises(GraphError, match=r"has 1 along .* and 128 .* be 64 \* heads"):
        prove(combined(1), h=3, n=256, cuts=1)


@graph_function
def squares(g: Graph) -> None:
    m, n, strips = g.dims("m n strips")
    x, w = g.input("x", (m, 64), "bfloat16"), g.input("w", (n, 64), "bfloat16")
    y, sums = g.output("y", (m, n), "bfloat16"), g.output("s", (strips, m), "float32")
    tiles = Tiles(g, "tile", 0, [TileShape(128, 128, swapped=True)])
    i, j = grid = g.grid(i=ceildiv(m, 128), j=ceildiv(n, 128))
    rows, columns = tile(i, 128), tile(j, 128)
    g.call(
        tiles.matmul("bfloat16", row_squares),
        grid,
        reads=[x[rows, :], w[columns, :]],
        writes=[y[rows, columns], sums[tile(j, tiles.strips()), rows]],
        values=tiles.values,
    )


def test_an_epilogue_has_a_number_for_each_strip_of_a_tile() -> None:
    prove(squares(1), m=128, n=200, strips=4)
    prove(squares(1), m=128, n=136, strips=3)
    with pytest.raises(GraphError, match=r"has 72 along .* and 1 .* be columns / \(64"):
        prove(squares(1), m=128, n=200, strips=3)


@graph_function
def multiplied(g: Graph, *, w_layout: str, gated: bool, size: tuple[int, int]) -> None:
    m, n = g.dims("m n")
    shape = (n, 64) if w_layout == "nk" else (64, n)
    x, w = g.input("x", (m, 64), "bfloat16"), g.input("w", shape, "bfloat16")
    y = g.output("y", (m, n), "bfloat16")
    tiles = Tiles(g, "tile", 0, [TileShape(128, 128)], w_layout=w_layout)
    i, j = grid = g.grid(i=ceildiv(m, size[0]), j=ceildiv(n, size[1]))
    rows, columns = tile(i, size[0]), tile(j, size[1])
    weight = weight_columns(w_layout, w, columns)
    g.call(
        tiles.matmul("bfloat16", swiglu if gated else store),
        grid,
        reads=[x[rows, :], *[weight] * (2 if gated else 1)],
        writes=[y[rows, columns]],
        values=tiles.values,
    )


@pytest.mark.parametrize(
    ("w_layout", "gated", "size", "fault"),
    [
        ("nk", False, (256, 128), r"has 256 along axis 0 of x\[i \* 256 .* most 128"),
        ("nk", False, (128, 192), r"has 192 along axis 0 of w\[j \* 192 .* most 128"),
        ("kn", False, (128, 192), r"has 192 along axis 1 of w\[:, j .* most 128"),
        ("nk", True, (128, 128), r"has 128 along axis 0 of w\[j \* 128 .* most 64"),
    ],
)
def test_a_region_larger_than_the_tile_is_refused(w_layout, gated, size, fault) -> None:
    graph = multiplied(1, w_layout=w_layout, gated=gated, size=size)
    prove(graph, m=128, n=64)  # all in one tile
    with pytest.raises(GraphError, match=f"{fault}(?s:.*)give each task at most one"):
        prove(graph, m=512, n=384)


@graph_function
def summed(g: Graph, *, swapped: bool) -> None:
    m, n = g.dims("m n")
    shape = TileShape(128, 128, swapped=swapped)
    tiles = Tiles(g, "tile", 0, [shape])
    sums = g.input("sums", (2, 8 * 1024), "float32")
    y = g.output("y", (m, n), "bfloat16")
    g.call(
        tiles.sum_parts("bfloat16"),
        g.grid(one=1),
        reads=[sums[:, :]],
        writes=[y[:, :]],
        values=tiles.values,
    )


@pytest.mark.parametrize("swapped", [False, True])
def test_a_region_larger_than_a_slice_of_a_tile_is_refused(swapped) -> None:
    prove(summed(1, swapped=swapped), m=64, n=64)
    with pytest.raises(
        GraphError, match=r"has 128 along axis (.) of y.* most 64"
    ) as caught:
        prove(summed(1, swapped=swapped), m=128, n=128)
    assert f"axis {int(not swapped)}" in str(caught.value)


@graph_function
def normalised(g: Graph) -> None:
    stack, m = g.dims("stack m")
    x, gain = g.input("x", (stack, 1, 8), "bfloat16"), g.input("gain", (8,), "bfloat16")
    y = g.output("y", (m, 8), "bfloat16")
    (i,) = grid = g.grid(i=m)
    reads = [x[tile(i, 1), :, :], gain[:]]
    g.call(rms_norm("bfloat16", 1e-6), grid, reads=reads, writes=[y[tile(i, 1), :]])


def test_index_of_a_further_axis_beyond_the_edge_is_refused() -> None:
    prove(normalised(1), stack=3, m=3)
    with pytest.raises(GraphError, match=r"has 0 of 1 along axis 0 of x\[i \+: 1"):
        prove(normalised(1), stack=2, m=3)
