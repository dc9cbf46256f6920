"""Dims of a run that select no tile are refused before it, on every rank."""

from __future__ import annotations

from functools import cache, partial

import numpy as np
import pytest

import etc_dist
from etc_dist.emulate import Emulator
from etc_dist.errors import ArgumentError, GraphError
from etc_dist.functions.epilogue import logits
from etc_dist.functions.scaled_weights import PER_BLOCK, Scaling
from etc_dist.functions.tile_shape import TileShape, shapes_for
from etc_dist.ir import Graph, GraphFunction
from etc_dist.ir.dims import checked_dims
from etc_dist.ir.tensor import numpy_dtype
from etc_dist.ops.matmul import matmul_graph
from etc_dist.ops.multiply import tiles_of_dims
from etc_dist.runtime.cpu import simulate
from etc_dist.schedule import schedule_static
from etc_dist.verify.verify import verify
from tests.graphs.parts import gated_parts
from tests.ops.arrays import Arrays
from tests.refusals import refused

SHAPES = (
    TileShape(16, 64, swapped=True),
    TileShape(32, 128, swapped=True),
    TileShape(144, 128, swapped=True),
    TileShape(128, 160),
)
FITTING = {"shape": 1, "column_groups": 12, "split_tile_columns": 0, "parts": 1}
NO_TILE = "has no tile of these numbers|choose them by choose() of"
TABLE = [
    ({"shape": 4}, f"{NO_TILE}|wanted: shape = 0 to 3 got: shape = 4, 8 * col"),
    ({"shape": 99, "column_groups": 0}, f"{NO_TILE}|wanted: shape = 0 to 3 got"),
    ({"column_groups": 0}, f"{NO_TILE}|got: shape = 1, 8 * column_groups = 0 to do"),
    ({"column_groups": 8}, "8 * column_groups = 80 to 128 in steps of 16 if shape = 1"),
    ({"column_groups": 11}, f"{NO_TILE}|got: shape = 1, 8 * column_groups = 88"),
    ({"column_groups": 18}, f"{NO_TILE}|got: shape = 1, 8 * column_groups = 144"),
    ({"shape": 0, "column_groups": 9}, "groups = 8 to 64 in steps of 8 if shape = 0"),
    ({"shape": 2}, "wanted: 8 * column_groups = 128 if shape = 2 got"),
    ({"shape": 3, "column_groups": 16}, "wanted: 8 * column_groups = 160 if shape = 3"),
    ({"split_tile_columns": 4}, "the grid is [1, -1]"),
    ({"parts": 0}, "part_boxes|divisors other than 0"),
    ({"split_tile_columns": 1, "parts": 9}, "reads x|outside of"),
]
"""Dims, and words of the error."""


@cache
def inputs() -> dict[str, np.ndarray]:
    shapes = {"x": (20, 512), "w": (264, 512)}
    return {n: np.ones(shape, numpy_dtype("bfloat16")) for n, shape in shapes.items()}


@cache
def graph() -> GraphFunction:
    return matmul_graph(1, shapes=SHAPES)


@pytest.mark.parametrize(("dims", "words"), TABLE)
def test_a_proof_and_a_simulation_refuse_dims_without_a_tile(dims, words):
    plan, sizes = schedule_static(graph()), {"m": 20, "n": 264, "k": 512}
    verify(plan, {**sizes, **FITTING}, 4)
    dims = {**sizes, **FITTING, **dims}
    refused(lambda: verify(plan, dims, 4), words, (ArgumentError, GraphError))
    if NO_TILE in words:
        refused(lambda: simulate(plan, [inputs()], dims), words, ArgumentError)


@pytest.mark.parametrize(("dims", "words"), TABLE[:4])
def test_an_emulated_run_refuses_dims_without_a_tile(dims, words):
    program, sizes = Emulator(graph()), {"m": 20, "n": 264, "k": 512}
    dims = {**sizes, **FITTING, **dims}
    refused(lambda: program.run([inputs()], dims), words, ArgumentError)


@pytest.mark.mpi
@pytest.mark.parametrize(("dims", "words"), TABLE)
def test_all_ranks_refuse_dims_of_one_of_them_without_a_tile(dims, words, world):
    put, program = Arrays(world.backend).put, etc_dist.compile(graph_of(world), world)
    arrays = {name: put(array) for name, array in inputs().items()}
    is_last = world.rank == world.size - 1
    choice = {**FITTING, **(dims if is_last else {})}
    kinds = ArgumentError, GraphError
    refused(lambda: program.run(dims=choice, **arrays), words, kinds)
    program.run(dims=FITTING, **arrays)
    program.close()


def graph_of(world) -> GraphFunction:
    return matmul_graph(world.size, shapes=SHAPES)


@pytest.mark.parametrize(
    ("w_layout", "dims", "words"),
    [
        ("kn", {"shape": 1, "column_groups": 12}, "8 * column_groups = 128 if shape"),
        ("kn", {"shape": 3, "column_groups": 20}, "wanted: shape = 0 to 2 got"),
        ("gated", {"shape": 0, "column_groups": 4}, "no gated tile|64 if shape = 0"),
        ("gated", {"shape": 1, "column_groups": 9}, "no gated tile|80 to 128 in steps"),
    ],
)
def test_other_weights_have_fewer_tiles(w_layout, dims, words):
    if w_layout == "gated":
        matmuls = gated_parts(1, shapes=SHAPES)
    else:
        matmuls = matmul_graph(1, shapes=SHAPES, w_layout=w_layout)
    plan = schedule_static(matmuls)
    dims = {"m": 20, "n": 264, "k": 512, **FITTING, **dims}
    refused(lambda: verify(plan, dims, 4), words, ArgumentError)


def test_wide_tiles_serve_whole_tiles_of_weights_n_k_that_are_only_rounded():
    wide, g = (TileShape(144, 256, swapped=True),), Graph("one", 1)
    tiles = tiles_of_dims(g, "", wide)
    words = "wide tiles are not divided along k|got: parts of tiles of 256 columns"
    refused(lambda: tiles.matmul("bfloat16", is_part=True), words)
    refused(lambda: tiles.sum_parts("bfloat16"), words)
    refused(lambda: matmul_graph(1, shapes=wide), words)
    words = "as their tasks do not have the epilogue|got: epilogue logits to do"
    refused(lambda: tiles.matmul("bfloat16", logits), words)
    for w_layout in ("kn", Scaling(PER_BLOCK, "float32").w_layout):
        refused(partial(shapes_for, w_layout, wide), "144 x 256, swapped")
    tiles.matmul("bfloat16")


def test_required_numbers_that_divide_by_zero_are_named():
    g = Graph("one", 1)
    m, n = g.dims("m n")
    g.require("bad ratio", [m // n], [(2,)], "mend it")
    function = g.finish()
    assert checked_dims(function, {"m": 4, "n": 2}) == {"m": 4, "n": 2}
    refused(
        lambda: checked_dims(function, {"m": 6, "n": 2}), "bad ratio", ArgumentError
    )
    words = "a number of g.require cannot be computed|wanted: divisors other than 0"
    refused(lambda: checked_dims(function, {"m": 4, "n": 0}), words, ArgumentError)


def test_constants_are_refused_in_the_graph():
    g = Graph("one", 1)
    count = g.let("count", 3)
    g.require("wrong count", [count, 2], [(1, 2), (3, 2)], "count anew")
    words = (
        "wrong count|where: graph one: g.require|got: 3 = 3, 2 = 2|to do: count anew"
    )
    refused(lambda: g.require("wrong count", [count, 2], [(1, 2)], "count anew"), words)
    assert g.finish().requirements == ()


def test_a_graph_without_a_fitting_tile_is_refused():
    wrong = [], [(1, 2), (3,)], [2, 3], [(1, 2.5)]
    for values, text in zip(wrong, map(str, wrong), strict=True):
        g = Graph("one", 1)
        act = partial(g.require, "wrong", g.dims("m n"), values, "mend it")
        refused(act, f"wrong|wanted: values of m, n got: {text} to do: mend it")
    narrow = (TileShape(16, 32, swapped=True),)
    refused(lambda: gated_parts(1, shapes=narrow), "has no gated tile|got: [] to do")
