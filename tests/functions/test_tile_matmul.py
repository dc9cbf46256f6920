"""Dense matrix multiplication on tiles of many shapes: the CUDA half, emulated."""

from __future__ import annotations

from functools import cache, partial

import numpy as np
import pytest

from etc_dist.emulate import Emulator
from etc_dist.errors import ArgumentError, GraphError
from etc_dist.functions.epilogue import residual, store, store_on_ranks, swiglu
from etc_dist.functions.tile_matmul import Tiles
from etc_dist.functions.tile_shape import TileShape, shapes_for
from etc_dist.ir import Graph
from etc_dist.ops.argument_table import DTYPES
from etc_dist.ops.tile_model import FAMILY
from tests.emulate.cases import gated, matmul_of, tiles
from tests.functions.both import both
from tests.functions.sizes import odd_sizes
from tests.graphs.epilogues import product, weights_of
from tests.layers.reference import draw
from tests.ops.arrays import cancelling
from tests.refusals import refused

exhaustive = pytest.mark.exhaustive
KINDS = (
    TileShape(64, 64, swapped=True),
    TileShape(8, 56, swapped=True),
    TileShape(64, 128, swapped=True),
    TileShape(144, 128, swapped=True),
    TileShape(128, 112),
)
"""One shape of each kind. --all runs all shapes."""
some_shapes = pytest.mark.parametrize(
    "shapes", [KINDS, pytest.param(FAMILY, marks=exhaustive)], ids=["kinds", "all"]
)
EXTREME = (
    *(TileShape(128, columns) for columns in (16, 256)),
    *(TileShape(8, columns, swapped=True) for columns in (8, 80)),
    *(TileShape(rows, 2 * rows, swapped=True) for rows in (8, 64)),
)
GATED = [number for number, shape in enumerate(FAMILY) if shape.may_be_gated]


@cache
def program(shapes: tuple[TileShape, ...]) -> Emulator:
    return Emulator(product(1, dtypes=DTYPES, shapes=shapes), workers=2)


@some_shapes
def test_each_shape_gives_x_times_w_transposed_in_both_dtypes(shapes):
    rng = np.random.default_rng(7)
    for shape_idx, shape in enumerate(shapes):
        m, n, k = odd_sizes(shape)
        arrays = {
            f"{name}_{dtype}": draw(rng, (rows, k), dtype)
            for dtype in DTYPES
            for name, rows in (("x", m), ("w", n))
        }
        dims = {"m": m, "n": n, "k": k, "shape": shape_idx}
        [outputs] = program(shapes).run([arrays], dims)
        for dtype in DTYPES:
            answer = matmul_of(arrays[f"x_{dtype}"], arrays[f"w_{dtype}"])
            answer.check(outputs[f"y_{dtype}"], dtype)


@pytest.mark.parametrize(
    "dtype", ["float16", pytest.param("bfloat16", marks=exhaustive)]
)
@some_shapes
def test_each_shape_for_transposed_weights_multiplies_by_them(shapes, dtype):
    shapes = shapes_for("kn", shapes)
    graph = product(1, dtypes=[dtype], w_layout="kn", shapes=shapes)
    kn, rng = Emulator(graph, workers=2), np.random.default_rng(8)
    for shape_idx, shape in enumerate(shapes):
        m, n, k = odd_sizes(shape)
        x, w = draw(rng, (m, k), dtype), draw(rng, (k, n), dtype)
        [outputs] = kn.run([{"x": x, "w": w}], dict(m=m, n=n, k=k, shape=shape_idx))
        matmul_of(x, w.T).check(outputs["y"], dtype)


@pytest.mark.parametrize(
    ("rows", "tile", "tile_rows"),
    [
        (200, TileShape(128, 128), 104),
        (96, TileShape(128, 112), 96),
        (96, TileShape(64, 128, swapped=True), 48),
        (3, TileShape(8, 64, swapped=True), 8),
        (300, TileShape(144, 128, swapped=True), 104),
    ],
)
def test_rows_are_divided_evenly_into_tiles(rows, tile, tile_rows):
    graph = product(1, shapes=[tile])
    env = graph.environment({"m": rows, "n": 512, "k": 64, "shape": 0}, 0)
    assert env["tile_even_rows"] == tile_rows
    assert env["tiles_down"] == -(-rows // tile.rows)
    assert env["tile_tile"] >> 24 == tile_rows // 8


@some_shapes
def test_tiles_that_add_k_in_its_order_give_the_same_bits(shapes, rng):
    dims, arrays = {"m": 3, "n": 24, "k": 456}, {}
    for dtype in DTYPES:
        pair = cancelling(rng, *dims.values(), dtype)
        arrays |= {f"{name}_{dtype}": a for name, a in zip("xw", pair, strict=True)}
    bits = {}
    for shape_idx, shape in enumerate(shapes):
        [outputs] = program(shapes).run([arrays], {**dims, "shape": shape_idx})
        for dtype in DTYPES:
            of_kind = bits.setdefault((dtype, shape.k_parts), set())
            of_kind.add(outputs[f"y_{dtype}"].tobytes())
    for dtype in DTYPES:
        in_order = bits[dtype, 1]
        assert len(in_order) == 1
        assert in_order.isdisjoint(bits[dtype, 2])


@pytest.mark.parametrize("what", [store, swiglu], ids=str)
def test_biases_of_columns_are_added_to_the_sums(what, rng):
    shapes = [*KINDS, TileShape(128, 96)]
    shapes = [shape for shape in shapes if shape.may_be_gated or not what.gated]
    program = Emulator(product(1, what=what, shapes=shapes, is_biased=True), workers=2)
    for shape_idx, shape in enumerate(shapes):
        m, n, k = odd_sizes(shape)
        names = weights_of(what)
        weights = {name: draw(rng, (n, k), "bfloat16") for name in names}
        biases = {f"b{i}": draw(rng, (n,), "bfloat16") for i in range(len(names))}
        arrays = {"x": draw(rng, (m, k), "bfloat16"), **weights, **biases}
        dims = {"m": m, "n": n, "k": k, "shape": shape_idx}
        expected, outputs = both(program, arrays, dims)
        y, reference = (o["y"].astype(np.float32) for o in (outputs, expected))
        np.testing.assert_allclose(y, reference, rtol=0.02, atol=0.02)


@pytest.fixture(scope="module")
def gated_program() -> Emulator:
    graph = product(1, what=swiglu, shapes=FAMILY)
    return Emulator(graph, workers=2)


# tests/functions/test_epilogue.py gates columns of each kind of tile.
@exhaustive
@pytest.mark.parametrize("number", GATED, ids=lambda n: str(FAMILY[n]))
def test_each_shape_gates_its_columns(number, gated_program):
    smaller_than_a_half = (3, 8, 72)
    for size in odd_sizes(FAMILY[number]), smaller_than_a_half:
        inputs, [answer], dims = gated(*size)
        [outputs] = gated_program.run(inputs, {**dims, "shape": number})
        answer.check(outputs["y"], "bfloat16")


def test_weights_and_epilogues_without_tiles_are_refused():
    narrow = TileShape(128, 112)
    for w_layout, shapes, what, text in (
        ("kn", [narrow], "no tiles serve the weights", "128 x 112"),
        ("kn", [], "no tile shapes are given", "none"),
        ("nk", [], "no tile shapes are given", "none"),
    ):
        with pytest.raises(GraphError, match=what) as caught:
            Tiles(Graph("one", 1), "tile", 0, shapes, w_layout=w_layout)
        assert caught.value.got == text
    tiles = Tiles(Graph("one", 1), "tile", 0, [TileShape(128, 128)], w_layout="kn")
    with pytest.raises(GraphError, match="have no gated epilogues"):
        tiles.matmul("bfloat16", swiglu)
    words = "stores them on several ranks|got: epilogue store_on_ranks, has_peers=False"
    for make in (tiles.matmul, tiles.sum_parts):
        refused(lambda make=make: make("bfloat16", store_on_ranks(2)), words)
    for make in (tiles.matmul, tiles.sum_parts):
        words = "unknown dtype|wanted: 'bfloat16' or 'float16' or 'float32' got: dtype"
        refused(lambda make=make: make("half"), words, ArgumentError)


def test_parts_with_other_epilogues_are_refused():
    shapes = [TileShape(64, 128, swapped=True)]
    tiles = Tiles(Graph("one", 1), "tile", 0, shapes)
    words = "parts of a tile do not have the epilogue|got: epilogue residual to do"
    for call in (partial(tiles.matmul, is_part=True), tiles.sum_parts):
        call("bfloat16", swiglu)
        refused(partial(call, "bfloat16", residual), words)
    tiles = Tiles(Graph("one", 1), "tile", 0, shapes, has_peers=True)
    refused(
        lambda: tiles.matmul("bfloat16", store_on_ranks(2), is_part=True),
        "parts of a tile do not have the epilogue|got: epilogue store_on_ranks to do",
    )
    refused(
        lambda: tiles.matmul("bfloat16", is_part=True, is_biased=True),
        "parts of a tile have no biases|is_part=True, is_biased=True",
    )


@exhaustive
def test_the_widest_and_narrowest_tiles_give_x_times_w_transposed():
    graph = product(1, shapes=EXTREME)
    program = Emulator(graph, workers=2)
    inputs, [answer], dims = tiles(70, 88, 136)
    for number in range(len(EXTREME)):
        [outputs] = program.run(inputs, {**dims, "shape": number})
        answer.check(outputs["y"], "bfloat16")


def test_several_calls_may_share_their_tiles():
    g = Graph("shared", 1)
    tiles = Tiles(g, "tile", g.dims("shape"), FAMILY)
    plain, second, pairs = (tiles.matmul("bfloat16", e) for e in (store, store, swiglu))
    assert plain.boxes == second.boxes != pairs.boxes
    assert tiles.strips() is tiles.strips() is not tiles.strips(gated=True)
