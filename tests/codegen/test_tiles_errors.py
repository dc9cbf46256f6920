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
from etc_dist.functions.attend_prompt import attend_prompt
from etc_dist.functions.best_column import best_column, best_on_rank
from etc_dist.functions.choose_experts import choose_experts
from etc_dist.functions.combine_rows import combine_rows
from etc_dist.functions.combine_slices import combine_slices
from etc_dist.functions.down_token import down_token
from etc_dist.functions.epilogue import residual, swiglu
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
from etc_dist.functions.tile_shape import TileShape
from etc_dist.ir import DeviceFunction, Extent, Graph, GraphFunction, Operand
from etc_dist.layers.moe_steps import Sizes
from etc_dist.schedule import schedule_static
from tests.graphs.calls import one_call
from tests.graphs.dense import dense, own_rows
from tests.graphs.mixtures import moe_graph
from tests.graphs.summed import summed
from tests.refusals import refused


def source_of(graph: Any) -> str:
    return generate(schedule_static(graph)).text


call_of = partial(one_call, name="call")


def stored(x: str, depth: str = "72", function: Any = dense, dtype: str = "bfloat16"):
    """A GEMM that stores as many rows as it reads of x."""
    reads = [f"x {x} {depth} {dtype}", f"w m/128 {depth} {dtype}"]
    return call_of(1, function, reads, [f"y m{x[x.index('[') :]} m/128 {dtype}"])


def pushed(x: str, y: str) -> Any:
    reads, writes = [f"x {x} bfloat16"], [f"y {y} bfloat16"]
    return call_of(1, push_rows(), reads, writes, grid="i: m")


def slots_of(world: int, x: str, y: str) -> Any:
    return call_of(world, sum_ranks("bfloat16"), [f"x {x}"], [f"y {y}"])


def declared(rows: int, columns: str) -> Any:
    """A call of a function of a user, with its tile."""
    tile_of_f = {
        0: Operand((Extent(most=64), "n"), "float32"),
        1: Operand((None, "n"), ("float32", "bfloat16"), leading=True),
    }
    f = DeviceFunction("f", print, "f.cuh", "tensor", 1, 1, tile=tile_of_f)
    x, y = f"x m/{rows} 8 float32", f"y 2[0] m/{rows} {columns} float32"
    return call_of(1, f, [x], [y])


OF_8, SPLIT = (
    Routing(8, Router(2), "bfloat16", split=split) for split in (False, True)
)
PAGED = PagedCache(64, 16, norm_eps=1e-6)
# Each function with the sizes of its operands: dims by name, with at most this many
# elements in a region. A capital letter stands for another dim of the same size.
ALIKE = {
    "store": (dense, "m,k n,k m,n", {"m": 128, "n": 128}),
    "residual": (
        partial(dense, epilogue=residual),
        "m,k n,k m,n m,n",
        {"m": 128, "n": 128},
    ),
    "swiglu": (partial(dense, epilogue=swiglu), "m,k n,k n,k m,n", {"m": 128, "n": 64}),
    "kn": (
        partial(dense, dtype="float16", w_layout="kn"),
        "m,k k,n m,n",
        {"m": 128, "n": 256},
    ),
    "own rows": (own_rows, "m,k n,k m,n", {"m": 144, "n": 256}),
    "own rows, biased": (
        partial(own_rows, is_biased=True),
        "m,k n,k n m,n",
        {"m": 144, "n": 256},
    ),
    "own rows, gated": (
        partial(own_rows, epilogue=swiglu),
        "m,k n,k n,k m,n",
        {"m": 144, "n": 128},
    ),
    "own rows, gathered": (
        partial(own_rows, epilogue=swiglu, gathers=True, is_biased=True),
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
    "append": (append_kv(PAGED), "m,64 m,64 64 t,64 m m t,k t,2,1,c,64", {"c": 16}),
    "attend": (
        attend(PAGED),
        "m,256 64 t,64 t,k t,2,1,16,64 m,4 k,4 c,4,64 c,4,2 c,256",
        {},
    ),
    "prompt": (
        attend_prompt(PAGED),
        "m,256 64 t,64 t,k t,2,1,16,64 m,4 m,256",
        {"m": 128},
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


def of_sizes(name: str, shapes: str) -> GraphFunction:
    """A call of one of `ALIKE` with operands of these sizes."""
    maker, _, most = ALIKE[name]

    def without_prefetch(g: Graph) -> tuple[DeviceFunction, Any]:
        function, values = (
            (maker, {}) if isinstance(maker, DeviceFunction) else maker(g)
        )
        return replace(function, reads_before_wait=()), values  # there is no wait

    function, _ = without_prefetch(Graph("sizes", 1))
    parts, regions = [], []
    for n, shape in enumerate(shapes.split()):
        operand = function.tile.get(n, Operand())
        dtype = operand.dtype[0] if operand.dtype else "bfloat16"
        axes = [re.sub("([a-zA-Z])", r" * of_\1", f"1{a}" if a.isalpha() else a)
                for a in shape.split(",")]  # fmt: skip
        index = [
            f"span(0, minimum({most[a.lower()]}, of_{a}))" if a.lower() in most else ":"
            for a in shape.split(",")
        ]
        parts.append(f"local t{n} [{', '.join(axes)}] {dtype}")
        regions.append(f"t{n}[{', '.join(index)}]")
    return call_of(
        1,
        without_prefetch,
        regions[: function.reads],
        regions[function.reads :],
        dims=" ".join(f"of_{letter}" for letter in "chkmntHMN"),
        parts="\n".join(parts),
        grid="j: 1, s: 1",
        values=dict.fromkeys(NUMBERS.get(name, []), 1),
    )


def misfits(shapes: str) -> list[str]:
    """The shapes with another dim in place of one h, m or n."""
    places = [i for i, letter in enumerate(shapes) if letter in "hmn"]
    return [shapes[:i] + shapes[i].upper() + shapes[i + 1 :] for i in places]


@pytest.mark.parametrize("name", ALIKE)
def test_sizes_that_a_function_takes_from_another_operand_must_be_equal(name):
    shapes = ALIKE[name][1]
    assert not [*tile_errors(of_sizes(name, shapes))]
    for wrong in misfits(shapes):
        (error,) = tile_errors(of_sizes(name, wrong))
        assert "does not fit the tile of" in error.what
        assert {"of_H", "of_M", "of_N"} & set(re.findall(r"\w+", error.got))
        assert re.search(", where (another|64 \\*) ", error.got)


@pytest.mark.parametrize("name", [n for n in ALIKE if re.search("[2-9]", ALIKE[n][1])])
def test_sizes_that_a_function_has_as_constants_must_be_complete(name):
    shapes = ALIKE[name][1]
    for match in re.finditer(r"\b([2-9]|[1-9]\d+)\b", shapes):
        fewer = str(int(match[0]) - 1)
        wrong = shapes[: match.start()] + fewer + shapes[match.end() :]
        (error,) = tile_errors(of_sizes(name, wrong))
        assert "does not fit the tile of" in error.what
        places = f": size {fewer}|another columns is {fewer}"
        assert re.search(f"{places}|where 64 .* is {64 * int(fewer)}", error.got)


def picks(experts: str) -> GraphFunction:
    reads, at = [f"logits m[i] {experts} float32"], "input at [1] int32"
    writes = ["ids m[i] 2 int32", "weights m[i] 2 float32"]
    function = choose_experts(OF_8, 1)
    return call_of(1, function, reads, writes, grid="i: m", parts=at)


def of_own_rows(size: Extent) -> GraphFunction:
    """A tile of rows of which a rank may have fewer."""
    tile_of_f = {0: Operand((size, 8), "float32")}
    f = DeviceFunction("f", print, "f.cuh", "tensor", 1, 0, tile=tile_of_f)
    reads, parts = ["x rows[tile(i, 64)] 8 float32"], "own_rows rows most"
    return call_of(2, f, reads, grid="i: most", parts=parts)


TAKEN = {
    "depth": (stored("m[tile(i, 128)]", "72[span(8, 64)]"), "tile_matmul"),
    "depth to the end": (
        stored("m[tile(i, 128)]", "72[span(8, minimum(64, 72 - 8))]"),
        "tile_matmul",
    ),
    "whole": (stored("m[tile(i, 128)]"), "tile_matmul"),
    "a tile of a stack": (pushed("m[1] m/8@i 64", "m/8@i 64"), "push_rows"),
    "whole rows": (
        call_of(1, push_rows(), ["x m/8 m 64 bfloat16"], ["x m/8 m 64 bfloat16"]),
        "push_rows",
    ),
    "a part of a row": (
        pushed("m[0] m[i] 64[span(8, 16)]", "m[i] 64/16@i"),
        "push_rows",
    ),
    "a row on a row": (pushed("m[0] m[i] 64", "m[span(i, 1)] 64"), "push_rows"),
    "slots": (
        slots_of(2, "2 m/32 64[:64] bfloat16", "m/32 64[:64] bfloat16"),
        "sum_ranks",
    ),
    "declared": (declared(64, "8"), "f<Task>"),
    "tile of a constant": (picks("8[tile(0, 8)]"), "choose_experts"),
    "own rows": (of_own_rows(Extent(64, clipped=True)), "f<Task>"),
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
    "32 rows": (
        stored("m[tile(i, 32)]", function=CLIPPED),
        "got: axis 0: size 32 to do",
    ),
    "32 of 32": (
        stored("32[tile(i, 32)]", function=CLIPPED),
        "got: axis 0: size 32 to do",
    ),
    "a stack": (
        call_of(
            1,
            CLIPPED,
            ["x 2 m/128 72 bfloat16", "w m/128 72 bfloat16"],
            ["y m/128 m/128 bfloat16"],
        ),
        "3 axes",
    ),
    "24 of k": (
        stored("m[tile(i, 128)]", "72[span(0, 24)]"),
        "got: axis 1: size 24 to do",
    ),
    "dtype": (stored("m[tile(i, 128)]", dtype="float32"), "got: float32 to do"),
    "part of rows": (
        pushed("m[1] m/8@i 64[:16]", "m/8@i 64[:16]"),
        UNFIT + "push_rows",
    ),
    "a plane": (pushed("m m[i] 64", "m/8@i 64"), UNFIT + "push_rows"),
    "another size": (pushed("m[1] m/8@i 64", "m/4@i 64"), UNFIT + "push_rows"),
    "slots of some ranks": (
        slots_of(1, "4[1:3] m/32 64 float16", "m/32 64 float16"),
        "got: float16; axis 0: size 2, where another world is 1 to do",
    ),
    "slots of fewer ranks": (
        slots_of(2, "2[1:3] m/32 64 bfloat16", "m/32 64 bfloat16"),
        "got: axis 0: size 2 from 1, clipped at 2 to do",
    ),
    "65 rows": (declared(65, "8"), "got: axis 0: size 65 to do"),
    "columns of two": (
        declared(64, "8[span(0, 4)]"),
        "wanted: operand 1: [one index each, any, n], float32 or bfloat16 got: axis 2: "
        "size 4, where another n is 8 to do",
    ),
    "place on a peer": (
        summed(3, shapes=[TileShape(128, 128)], shift=1),
        "the place of operand 2 on another rank",
    ),
    "clipped": (picks("4[tile(0, 8)]"), "size 8 from 0, clipped at 4 to do"),
    "dim": (picks("e"), "size e to do"),
    "loaded": (picks("16[span(at.load(0), 8)]"), "as its place is loaded to do"),
    "own rows": (
        of_own_rows(Extent(64)),
        "got: axis 0: size 64, where it may be clipped at rows to do",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_region_that_is_no_tile_is_refused(name):
    graph, words = REFUSED[name]
    refused(lambda: source_of(graph), words, CodegenError)
