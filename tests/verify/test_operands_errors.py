"""Operands of one task that overlap, or that the edges of tensors clip."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from etc_dist.functions.add_partials import add_partials
from etc_dist.functions.choose_experts import choose_experts
from etc_dist.functions.combine_slices import combine_slices
from etc_dist.functions.epilogue import logits, row_squares, swiglu
from etc_dist.functions.push_rows import push_rows
from etc_dist.functions.rms_norm import rms_norm
from etc_dist.functions.router import Router
from etc_dist.functions.routing import Routing
from etc_dist.functions.scaled_weights import E4M3, FLOAT8_SCALINGS, ScaledTensor
from etc_dist.functions.tile_matmul import Tiles
from etc_dist.functions.tile_shape import TileShape
from etc_dist.ir import (
    Extent,
    Graph,
    GraphFunction,
    Operand,
    ceildiv,
    span,
    tile,
)
from etc_dist.ops.tile_model import FLOAT8_FAMILY
from etc_dist.schedule import schedule_static
from etc_dist.verify.verify import verify
from tests.graphs.calls import one_call
from tests.graphs.dense import dense
from tests.graphs.epilogues import product
from tests.graphs.kit import Kit, made
from tests.refusals import refused


def prove(graph: GraphFunction, **dims: int) -> None:
    verify(schedule_static(graph), dims, workers=2)


def push_within(to: int) -> GraphFunction:
    """A state moves by so many elements."""
    reads, writes = ["state[8:n]"], [f"state[{8 - to} : n - {to}]"]
    parts = "state state [n] float32"
    return one_call(1, push_rows(), reads, writes, dims="n", parts=parts)


def begun_by_unit(g: Kit) -> None:
    first, unit = g.dims("first unit")
    x = g.input("x", (16,), "float32")
    tiles = {0: Operand((Extent(begins=unit),), "float32")}
    g.do("read", reads=[x[span(first, 4)]], tile=tiles)


W = "w 128 128 bfloat16"
IN_PLACE = one_call(1, dense, ["x n[tile(0, 128)] 128 bfloat16", W], [W])
SQUARES = one_call(
    1,
    partial(dense, shape=TileShape(128, 128, swapped=True), epilogue=row_squares),
    ["x m/128 64 bfloat16", "w n/128 64 bfloat16"],
    ["y m/128 n/128 bfloat16", "s strips/2@n m/128 float32"],
)
SCORES = one_call(
    1,
    partial(dense, shape=TileShape(64, 128, swapped=True), epilogue=logits),
    ["x 64 64 bfloat16", "w experts/128@columns 64 bfloat16"],
    ["y 64 columns/128 float32"],
)


def summed(swapped: bool) -> GraphFunction:
    def sums(g: Graph) -> Any:
        tiles = Tiles(g, "tile", 0, [TileShape(128, 128, swapped=swapped)])
        return tiles.sum_parts("bfloat16"), tiles.values

    return one_call(1, sums, [f"sums 2 {8 * 1024} float32"], ["y m n bfloat16"])


CODES = next(iter(FLOAT8_SCALINGS.values()))


def of_codes(g: Kit, first: int) -> None:
    """Two tiles of weights in float8, from row `first` on."""
    m, n, number = g.dims("m n number")
    x, w = (
        ScaledTensor(
            g.input(name, (rows, 256), E4M3),
            g.input(f"{name}_scales", (blocks, 2), "float32"),
        )
        for name, rows, blocks in (("x", m, m), ("w", n, ceildiv(n, 128)))
    )
    tiles = Tiles(g, "tile", number, FLOAT8_FAMILY, w_layout=CODES.w_layout)
    y = g.output("y", (m, 2 * tiles.columns), "bfloat16")
    (j,) = grid = g.grid(j=2)
    weights = tiles.weight_tiles([w], span(first + j * tiles.columns, tiles.columns))
    g.call(
        tiles.matmul("bfloat16"),
        grid,
        reads=[
            x.codes[:, :],
            *weights,
            tiles.x_scales(x.scales, slice(None), slice(None)),
        ],
        writes=[y[:, tile(j, tiles.columns)]],
        values=tiles.values,
    )


def multiplied(
    size: tuple[int, int], w_layout: str = "nk", gated: bool = False
) -> GraphFunction:
    options = {"w_layout": w_layout, "size": size} | ({"what": swiglu} if gated else {})
    return product(1, shapes=[TileShape(128, 128)], **options)


CLIPPED = one_call(1, push_rows(), ["x n/64@m 8 float32"], ["y m/64 8 float32"])
CLIPPED_PARTS = one_call(
    1, add_partials("float32"), ["x 2 n/64@m 8 float32"], ["y m/64 8 float32"]
)
PICKS = one_call(
    1,
    choose_experts(Routing(8, Router(2), "bfloat16"), 1),
    ["logits n/1 e/8 float32"],
    ["int n/1 2/2@e int32", "flo n/1 2/2@e float32"],
)
COMBINED = one_call(
    1,
    combine_slices(64, "bfloat16"),
    ["sums 4 h/2 64 float32", "stats 4 h/2 2 float32"],
    ["y n/128@h bfloat16"],
    dims="h n cuts",
)
NORMALISED = one_call(
    1,
    rms_norm("bfloat16", 1e-6),
    ["x stack/1@m 1 8 bfloat16", "gain 8 bfloat16"],
    ["y m/1 8 bfloat16"],
)
FEW, MANY = {"m": 128, "n": 64, "k": 64, "shape": 0}, {"m": 512, "n": 384, "k": 64}
MANY["shape"] = 0
AT_MOST = "|give each task at most one"
# The graph, its dims, words of the refusal; dims with which it is proved.
REFUSALS = {
    "a part of its source": (
        push_within(4),
        {"n": 64},
        "which overlaps state[8 +: n - 8]",
    ),
    "its weight": (
        IN_PLACE,
        {"n": 128},
        "writes w[:, :], which overlaps w",
    ),
    **{
        f"{name}, clipped to {m}": (
            graph,
            {"n": 16, "m": m},
            "has 16 along|which must be equal",
            {"n": m, "m": m},
        )
        for name, graph in (("rows", CLIPPED), ("parts", CLIPPED_PARTS))
        for m in (32, 100)
    },
    "smaller than a constant": (
        PICKS,
        {"n": 3, "e": 6},
        "has 6 of 8 along axis 1 of logits[i +: 1, j * 8 +: 8]|2 more like it",
        {"n": 3, "e": 8},
    ),
    "a size with a factor": (
        COMBINED,
        {"h": 3, "n": 256, "cuts": 1},
        "has 1 along|and 128|be 64 * heads",
        {"h": 3, "n": 192, "cuts": 1},
    ),
    "a number for each strip": (
        SQUARES,
        {"m": 128, "n": 200, "strips": 3},
        "has 72 along|and 1|be columns / (64",
        {"m": 128, "n": 200, "strips": 4},
        {"m": 128, "n": 136, "strips": 3},
    ),
    **{
        f"logits of {experts} experts in {columns} columns": (
            SCORES,
            {"experts": experts, "columns": columns},
            f"has {experts - 128} along|and {columns - 128}|be 8 * columns / (8)",
            {"experts": experts, "columns": 136},
        )
        for experts, columns in ((131, 131), (131, 144), (136, 144), (129, 132))
    },
    "rows of a tile": (
        multiplied((256, 128)),
        MANY,
        "has 256 along axis 0 of x[i * 256|most 128" + AT_MOST,
        FEW,
    ),
    "columns of a tile": (
        multiplied((128, 192)),
        MANY,
        "has 192 along axis 0 of w[j * 192|most 128" + AT_MOST,
        FEW,
    ),
    "columns of weights [k, n]": (
        multiplied((128, 192), "kn"),
        MANY,
        "has 192 along axis 1 of w[:, j|most 128" + AT_MOST,
        FEW,
    ),
    "columns of a gated tile": (
        multiplied((128, 128), gated=True),
        MANY,
        "has 128 along axis 0 of gate[j * 128|most 64" + AT_MOST,
        FEW,
    ),
    **{
        f"a slice of a tile, axis {int(not swapped)}": (
            summed(swapped),
            {"m": 128, "n": 128},
            f"has 128 along axis {int(not swapped)} of y|most 64",
            {"m": 64, "n": 64},
        )
        for swapped in (False, True)
    },
    **{
        f"codes from row {first}, tile {number}": (
            made(partial(of_codes, first=first)),
            {"m": 8, "n": 512, "number": number},
            f"begins at {first} along axis 0 of w|at a multiple of {unit}",
        )
        for first, number, unit in (
            *((4, 1, 16), (8, 0, 32), (16, 0, 32)),
            *((64, 2, 128), (32, 5, 64), (96, 5, 64)),
        )
    },
    **{
        f"a place, unit {unit}": (
            made(begun_by_unit),
            {"first": 3, "unit": unit},
            f"begins at 3 along axis 0 of x|begins at {place}",
            {"first": first, "unit": unit},
        )
        for unit, place, first in ((4, "a multiple of 4", 8), (0, "0", 0))
    },
    "a further axis beyond the edge": (
        NORMALISED,
        {"stack": 2, "m": 3},
        "has 0 of 1 along axis 0 of x[i +: 1",
        {"stack": 3, "m": 3},
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_operands_that_do_not_fit_are_refused(name) -> None:
    graph, dims, words, *right = REFUSALS[name]
    refused(lambda: prove(graph, **dims), words)
    for dims in right:
        prove(graph, **dims)


def test_a_copy_to_another_part_is_proved() -> None:
    prove(push_within(8), n=16)  # 8:16 to 0:8


@pytest.mark.parametrize("number", range(len(FLOAT8_FAMILY)))
def test_tiles_of_codes_begin_where_their_scales_may_change(number) -> None:
    dims = {"m": 8, "n": 512, "number": number}
    for first in (0, 128):
        prove(made(partial(of_codes, first=first)), **dims)
