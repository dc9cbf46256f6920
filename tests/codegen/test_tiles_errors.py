"""Regions that the CUDA body of a device function does not support."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from etc_dist.codegen import generate
from etc_dist.codegen.tiles import tile_errors
from etc_dist.errors import CodegenError
from etc_dist.functions.add_experts_norm import add_experts_norm
from etc_dist.functions.append_kv import PagedCache, append_kv
from etc_dist.functions.attend import attend
from etc_dist.functions.best_column import best_column, best_on_rank
from etc_dist.functions.choose_experts import choose_experts
from etc_dist.functions.combine_rows import combine_rows
from etc_dist.functions.combine_slices import combine_slices
from etc_dist.functions.down_token import down_token
from etc_dist.functions.epilogue import residual, store, swiglu
from etc_dist.functions.gate_up_token import gate_up_token
from etc_dist.functions.locate_rows import locate_rows
from etc_dist.functions.pack_rows import pack_rows
from etc_dist.functions.plan_shares import plan_shares
from etc_dist.functions.plan_tiles import plan_tiles
from etc_dist.functions.push_rows import push_rows
from etc_dist.functions.push_tokens import push_tokens
from etc_dist.functions.route_rows import route_rows
from etc_dist.functions.router import Router
from etc_dist.functions.routing import Routing
from etc_dist.functions.sample_column import least_kept, sample_column
from etc_dist.functions.scatter_row import scatter_row
from etc_dist.functions.score_experts import score_experts
from etc_dist.functions.share_choices import share_choices
from etc_dist.functions.sum_ranks import sum_expert_ranks, sum_ranks
from etc_dist.functions.tile_matmul import Tiles
from etc_dist.functions.tile_shape import TileShape
from etc_dist.functions.wide_tile import RowTiles
from etc_dist.ir import (
    DeviceFunction,
    Extent,
    Graph,
    Operand,
    Region,
    Tensor,
    graph_function,
    minimum,
    span,
    tile,
)
from etc_dist.layers.moe_steps import Sizes
from etc_dist.schedule import schedule_static
from tests.graphs.dense import dense
from tests.graphs.mixtures import moe_graph
from tests.graphs.summed import summed
from tests.refusals import refused

ALL = slice(None)


def source_of(graph: Any) -> str:
    return generate(schedule_static(graph)).text


def made_in(g: Graph, made: Any) -> tuple[DeviceFunction, Any]:
    """A function, and `values=` of its calls."""
    return (made, {}) if isinstance(made, DeviceFunction) else made(g)


def one_call(
    made: Any,
    shapes: Any,
    index: Any,
    dtype: str = "bfloat16",
    world: int = 1,
) -> Any:
    """A call of a function on a grid of i: index(i, m, *tensors) is its regions."""

    @graph_function
    def graph(g: Graph) -> None:
        m = g.dims("m")
        tensors = [
            g.local(f"t{n}", [m if e is None else e for e in shape], dtype)
            for n, shape in enumerate(shapes)
        ]
        (i,) = grid = g.grid(i=m)
        (function, values), regions = made_in(g, made), index(i, m, *tensors)
        operands = {"reads": regions[: function.reads]}
        operands["writes"] = regions[function.reads :]
        g.call(function, grid, name="call", values=values, **operands)

    return graph(world)


def stored(
    size: Any,
    x: Any = (None, 72),
    depth: Any = slice(None),
    made: Any = dense,
    **more: Any,
) -> Any:
    def index(i: Any, m: Any, x: Tensor, w: Tensor, y: Tensor) -> list[Region]:
        return [
            x[tile(i, size), depth],
            w[tile(i, 128), depth],
            y[tile(i, size), tile(i, 128)],
        ]

    shapes = (x, (None, 72), (None, None))
    return one_call(made, shapes, index, **more)


def stacked_rows(i: Any, m: Any, x: Tensor, w: Tensor, y: Tensor) -> list[Region]:
    return [x[:, tile(i, 128), :], w[tile(i, 128), :], y[tile(i, 128), tile(i, 128)]]


def pushed(index: Any) -> Any:
    return one_call(push_rows(), ((None, None, 64), (None, 64)), index)


def summed_slots(slots: Any, columns: Any, *size: Any, **more: Any) -> Any:
    """slots: of the ranks; columns: of all."""

    def index(i: Any, m: Any, x: Tensor, y: Tensor) -> list[Region]:
        return [x[slots, tile(i, 32), columns], y[tile(i, 32), columns]]

    shapes = (*size, None, 64), (None, 64)
    return one_call(sum_ranks("bfloat16"), shapes, index, **more)


def declared(rows: int, columns: Any) -> Any:
    """A call of a function of a user, with its tile."""
    tile_of_f = {
        0: Operand((Extent(most=64), "n"), "float32"),
        1: Operand((None, "n"), ("float32", "bfloat16"), leading=True),
    }
    f = DeviceFunction("f", print, "f.cuh", "tensor", 1, 1, tile=tile_of_f)

    def index(i: Any, m: Any, x: Tensor, y: Tensor) -> list[Region]:
        return [x[tile(i, rows), :], y[0, tile(i, rows), columns]]

    return one_call(f, ((None, 8), (2, None, 8)), index, "float32")


def tiles_of(epilogue: Any) -> Any:
    def made(g: Graph) -> Any:
        tiles = Tiles(g, "tile", 0, [TileShape(128, 128)])
        return tiles.matmul("bfloat16", epilogue), tiles.values

    return made


def rows_of(*options: Any, **named: Any) -> Any:
    def made(g: Graph) -> Any:
        tiles = RowTiles(g, "tile")
        return tiles.matmul_rows("bfloat16", *options, **named), tiles.values

    return made


OF_8, SPLIT = (
    Routing(8, Router(2), "bfloat16", split=split) for split in (False, True)
)
PAGED = PagedCache(64, 16, norm_eps=1e-6)
# Each function with the sizes of its operands: dims by name, with at most this many
# elements in a region. A capital letter stands for another dim of the same size.
ALIKE = {
    "store": (tiles_of(store), "m,k n,k m,n", {"m": 128, "n": 128}),
    "residual": (tiles_of(residual), "m,k n,k m,n m,n", {"m": 128, "n": 128}),
    "swiglu": (tiles_of(swiglu), "m,k n,k n,k m,n", {"m": 128, "n": 64}),
    "kn": (
        partial(dense, dtype="float16", w_layout="kn"),
        "m,k k,n m,n",
        {"m": 128, "n": 256},
    ),
    "own rows": (rows_of(), "m,k n,k m,n", {"m": 144, "n": 256}),
    "own rows, biased": (
        rows_of(is_biased=True),
        "m,k n,k n m,n",
        {"m": 144, "n": 256},
    ),
    "own rows, gated": (
        rows_of(swiglu),
        "m,k n,k n,k m,n",
        {"m": 144, "n": 128},
    ),
    "own rows, gathered": (
        rows_of(swiglu, gathers=True, is_biased=True),
        "t,k n,k n,k n n m m,n",
        {"m": 144, "n": 128},
    ),
    "pack": (pack_rows("bfloat16"), "t,n m m,n", {}),
    "score": (score_experts(OF_8), "m,k c,k m,c", {"m": 32, "c": 32}),
    "choose": (choose_experts(OF_8, marks=True), "m,8 m,2 m,2 8,1", {"m": 32}),
    "slices": (combine_slices(64, "bfloat16"), "m,h,64 m,h,2 64h", {}),
    "best": (best_column("bfloat16"), "m,c m,1 m,1", {}),
    "rank": (best_on_rank(256), "m,n m,n m,1 m,1", {}),
    "sample": (sample_column("bfloat16", 256), "m,c m,5 m m m,1 m,1", {}),
    "kept": (least_kept("bfloat16"), "1,c 1,5 1", {}),
    "pick": (choose_experts(OF_8, 1), "1,8 1,2 1,2", {}),
    "choose rows": (
        choose_experts(OF_8, 8, has_position=True),
        "m,8 m m,2 m,2",
        {"m": 8},
    ),
    "route": (route_rows(OF_8), "m,8 m n,2 m,2 m,2 n,2 t,2 1", {"m": 16, "n": 128}),
    "scatter": (scatter_row(2, "bfloat16"), "1,n 1,n 1,n", {}),
    "share": (share_choices(OF_8), "8,1 m,2 m,2 8,1 m,2 m,2", {}),
    "locate": (locate_rows(OF_8), "m,2 8,1 8,1 8 m,2", {"m": 32}),
    "plan": (plan_tiles(OF_8), "8 t 8 m m m m 1", {}),
    "push": (push_tokens(OF_8), "m,n m,2 t m,n", {}),
    "combine": (combine_rows(OF_8), "m,2 m,2 t,n m,n", {}),
    "add": (add_experts_norm(OF_8, 1e-6), "1,2 1,2 t,n 1,n n 1,n 1,n", {}),
    "up": (gate_up_token(OF_8), "1,k 1,8 8,n,k 8,n,k 8,c,k 1,2,n", {}),
    "down": (down_token(OF_8), "1,2 1,2 1,2,k 8,n,k 1,n", {}),
    "sum": (sum_expert_ranks(SPLIT, 1), "1,m,n m,2 t m,n", {}),
    "append": (append_kv(PAGED), "m,64 m,64 64 t,64 m m t,k t,2,1,16,64", {}),
    "attend": (
        attend(PAGED),
        "m,256 64 t,64 t,k t,2,1,16,64 m,4 k,4 c,4,64 c,4,2 c,256",
        {},
    ),
    "shares": (plan_shares(PAGED), "t,64 m m t,k m,4 c,4 k,3 1", {"m": 512, "c": 9}),
}
NUMBERS = {
    "rank": ["first"],
    "sample": ["first"],
    "check": ["pages", "vocabulary"],
    "route": ["tile_rows", "stride", "gathers"],
    "attend": ["shares_of_task", "cuts"],
    "slices": ["cuts"],
    "shares": ["pages", "lists", "cuts"],
}


@graph_function
def of_sizes(g: Graph, *, name: str, shapes: str) -> None:
    made, _, most = ALIKE[name]
    function, values = made_in(g, made)
    letters = "chkmntHMN"
    dims = dict(zip(letters, g.dims(" ".join(f"of_{a}" for a in letters)), strict=True))
    regions = []

    def size(text: str) -> Any:
        digits, letter = re.fullmatch(r"(\d*)([a-zA-Z]?)", text).groups()
        return int(digits or 1) * (dims[letter] if letter else 1)

    for n, shape in enumerate(shapes.split()):
        axes = shape.split(",")
        operand = function.tile.get(n, Operand())
        tensor = g.local(
            f"t{n}",
            [size(a) for a in axes],
            operand.dtype[0] if operand.dtype else "bfloat16",
        )
        limits = [most.get(a.lower()) for a in axes]
        index = [
            slice(None) if limit is None else span(0, minimum(limit, dims[a]))
            for a, limit in zip(axes, limits, strict=True)
        ]
        regions.append(tensor[tuple(index)])
    function = replace(function, reads_before_wait=())  # there is no wait
    numbers = dict.fromkeys(NUMBERS.get(name, []), 1)
    g.call(
        function,
        g.grid(j=1, s=1),
        name="call",
        reads=regions[: function.reads],
        writes=regions[function.reads :],
        values={**values, **numbers},
    )


def misfits(shapes: str) -> list[str]:
    """The shapes with another dim in place of one h, m or n."""
    places = [i for i, letter in enumerate(shapes) if letter in "hmn"]
    return [shapes[:i] + shapes[i].upper() + shapes[i + 1 :] for i in places]


@pytest.mark.parametrize("name", ALIKE)
def test_sizes_that_a_function_takes_from_another_operand_must_be_equal(name):
    shapes = ALIKE[name][1]
    assert not [*tile_errors(of_sizes(1, name=name, shapes=shapes))]
    for wrong in misfits(shapes):
        (error,) = tile_errors(of_sizes(1, name=name, shapes=wrong))
        assert "does not fit the tile of" in error.what
        assert {"of_H", "of_M", "of_N"} & set(re.findall(r"\w+", error.got))
        assert re.search(", where (another|64 \\*) ", error.got)


@pytest.mark.parametrize("name", [n for n in ALIKE if re.search("[2-9]", ALIKE[n][1])])
def test_sizes_that_a_function_has_as_constants_must_be_complete(name):
    shapes = ALIKE[name][1]
    for found in re.finditer(r"\b([2-9]|[1-9]\d+)\b", shapes):
        fewer = str(int(found[0]) - 1)
        wrong = shapes[: found.start()] + fewer + shapes[found.end() :]
        (error,) = tile_errors(of_sizes(1, name=name, shapes=wrong))
        assert "does not fit the tile of" in error.what
        assert re.search(f": size {fewer}|where 64 .* is {64 * int(fewer)}", error.got)


@graph_function
def picks(g: Graph, *, place: str, experts: int = 8) -> None:
    m, e = g.dims("m e")
    at = g.input("at", (1,), "int32")
    logits = g.local("logits", (m, e if place == "dim" else experts), "float32")
    ids, weights = (g.local(t[:3], (m, 2), t) for t in ("int32", "float32"))
    places = {"tile": tile(0, 8), "loaded": span(at.load(0), 8)}
    (i,) = grid = g.grid(i=m)
    reads = [logits[i, places.get(place, slice(None))]]
    writes = [ids[i, :], weights[i, :]]
    g.call(choose_experts(OF_8, 1), grid, name="call", reads=reads, writes=writes)


@graph_function
def of_own_rows(g: Graph, *, size: Extent) -> None:
    """A tile of rows of which a rank may have fewer."""
    rows, most = g.own_rows("rows", "most")
    x = g.input("x", (rows, 8), "float32")
    tile_of_f = {0: Operand((size, 8), "float32")}
    f = DeviceFunction("f", print, "f.cuh", "tensor", 1, 0, tile=tile_of_f)
    (i,) = grid = g.grid(i=most)
    g.call(f, grid, name="call", reads=[x[tile(i, 64), :]])


TAKEN = {
    "depth": (stored(128, depth=span(8, 64)), "tile_matmul"),
    "depth to the end": (
        stored(128, depth=span(8, minimum(64, 72 - 8))),
        "tile_matmul",
    ),
    "whole": (stored(128), "tile_matmul"),
    "a tile of a stack": (
        pushed(lambda i, m, x, y: [x[1, tile(i, 8), :], y[tile(i, 8), :]]),
        "push_rows",
    ),
    "whole rows": (
        pushed(lambda i, m, x, y: [x[tile(i, 8), :, :], x[tile(i, 8), :, :]]),
        "push_rows",
    ),
    "a part of a row": (
        pushed(lambda i, m, x, y: [x[0, i, span(8, 16)], y[i, tile(i, 16)]]),
        "push_rows",
    ),
    "a row on a row": (
        pushed(lambda i, m, x, y: [x[0, i, :], y[span(i, 1), :]]),
        "push_rows",
    ),
    "slots": (
        summed_slots(ALL, slice(0, 64), 2, world=2),
        "sum_ranks",
    ),
    "declared": (declared(64, ALL), "f<Task>"),
    "tile of a constant": (picks(1, place="tile"), "choose_experts"),
    "own rows": (of_own_rows(2, size=Extent(64, clipped=True)), "f<Task>"),
}


@pytest.mark.parametrize("name", TAKEN)
def test_a_region_of_the_tile_is_taken(name):
    graph, words = TAKEN[name]
    assert words in source_of(graph)


UNFIT = "does not fit the tile of "
ROWS = Operand((Extent(64, clipped=True), "k"), "bfloat16")
CLIPPED = DeviceFunction("f", print, "f.cuh", "tensor", 2, 1, tile={0: ROWS})
"""Its rows are 64, or fewer at the edge."""
REFUSED = {
    "block": (moe_graph(1, experts=8, top_k=2, sizes=Sizes(block=16)), UNFIT),
    "rows": (moe_graph(1, experts=8, top_k=2, sizes=Sizes(tile_rows=320)), UNFIT),
    "columns": (moe_graph(1, experts=8, top_k=2, sizes=Sizes(tile_columns=528)), UNFIT),
    "32 rows": (stored(32, made=CLIPPED), "got: axis 0: size 32 to do"),
    "32 of 32": (stored(32, x=(32, 72), made=CLIPPED), "got: axis 0: size 32 to do"),
    "a stack": (
        one_call(CLIPPED, ((2, None, 72), (None, 72), (None, None)), stacked_rows),
        "3 axes",
    ),
    "24 of k": (stored(128, depth=span(0, 24)), "got: axis 1: size 24 to do"),
    "dtype": (stored(128, dtype="float32"), "got: float32 to do"),
    "part of rows": (
        pushed(lambda i, m, x, y: [x[1, tile(i, 8), 0:16], y[tile(i, 8), 0:16]]),
        UNFIT + "push_rows",
    ),
    "a plane": (
        pushed(lambda i, m, x, y: [x[:, i, :], y[tile(i, 8), :]]),
        UNFIT + "push_rows",
    ),
    "another size": (
        pushed(lambda i, m, x, y: [x[1, tile(i, 8), :], y[tile(i, 4), :]]),
        UNFIT + "push_rows",
    ),
    "slots of some ranks": (
        summed_slots(slice(1, 3), ALL, 4, dtype="float16"),
        "got: float16; axis 0: size 2, where another world is 1 to do",
    ),
    "slots of fewer ranks": (
        summed_slots(slice(1, 3), ALL, 2, world=2),
        "got: axis 0: size 2 from 1, clipped at 2 to do",
    ),
    "65 rows": (declared(65, ALL), "got: axis 0: size 65 to do"),
    "columns of two": (
        declared(64, span(0, 4)),
        "wanted: operand 1: [one index each, any, n], float32 or bfloat16 got: axis 2: "
        "size 4, where another n is 8 to do",
    ),
    "place on a peer": (
        summed(3, shapes=[TileShape(128, 128)], shift=1),
        "the place of operand 2 on another rank",
    ),
    "clipped": (picks(1, place="tile", experts=4), "size 8 from 0, clipped at 4 to do"),
    "dim": (picks(1, place="dim"), "size e to do"),
    "loaded": (picks(1, place="loaded", experts=16), "as its place is loaded to do"),
    "own rows": (
        of_own_rows(2, size=Extent(64)),
        "got: axis 0: size 64, where it may be clipped at rows to do",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_region_that_is_no_tile_is_refused(name):
    graph, words = REFUSED[name]
    refused(lambda: source_of(graph), words, CodegenError)
