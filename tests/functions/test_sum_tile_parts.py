"""Tiles of one worker, and parts of them that are added: the CUDA half, emulated."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from etc_dist.emulate import Emulator
from etc_dist.errors import EmulationError
from etc_dist.functions.tile_shape import TileShape, shapes_for
from etc_dist.functions.weight_layouts import silu
from etc_dist.ops.matmul import matmul_graph
from etc_dist.ops.tile_model import FAMILY
from tests.emulate.cases import SEEDS, check, matmul
from tests.functions.compiled import check_compiled
from tests.functions.sizes import odd_sizes
from tests.graphs.parts import (
    BY_KIND,
    EVERY,
    GATED_KINDS,
    HALVES,
    KINDS,
    TALL,
    Division,
    chained,
    given_to,
    graph_of,
    in_order,
    signs,
    two_matmuls,
)
from tests.layers.programs import without
from tests.layers.reference import Answer

exhaustive = pytest.mark.exhaustive


@cache
def emulated(kind, dtype, shapes=None):
    return Emulator(graph_of(kind, dtype, shapes), workers=2)


def dtypes_of(kind):
    """Both without --all for the first kind; compiling takes most of the time."""
    always = {"nk": ("bfloat16",), "kn": (), "gated": ("float16",)}[kind]
    for dtype in ("bfloat16", "float16"):
        yield dtype, [] if dtype in always else [exhaustive]


# Outputs are NaN until tasks write them; each program runs again immediately.
@pytest.mark.parametrize(
    ("kind", "name", "dtype"),
    [
        pytest.param(kind, name, dtype, marks=marks)
        for kind, name in EVERY
        for dtype, marks in dtypes_of(kind)
    ],
)
def test_parts_and_whole_tiles_give_the_reference(kind, name, dtype):
    operands = given_to(kind, BY_KIND[kind][name], dtype)
    check(emulated(kind, dtype), *operands, dtype)


@pytest.mark.parametrize("columns", range(8, 72, 8))
def test_few_rows_store_any_eighths_of_columns(columns):
    division = Division(KINDS[0], (5, 2 * columns + 8, 1032), columns, 1, 2)
    check(emulated("nk", "bfloat16"), *given_to("nk", division), seeds=SEEDS[1:])


@pytest.mark.parametrize("shape", KINDS, ids=str)
def test_parts_are_added_in_fp32_in_the_order_of_k(shape, rng):
    (inputs, _, dims), y = in_order(rng, shape, "bfloat16")
    dims["shape"] = KINDS.index(shape)
    [outputs] = emulated("nk", "bfloat16").run(inputs, dims, runs=2)
    np.testing.assert_array_equal(outputs["y"], y)


@exhaustive
@pytest.mark.parametrize("kind", BY_KIND)
def test_each_shape_of_the_family_divides_k(kind):
    shapes = tuple(shapes_for("kn" if kind == "kn" else "nk", FAMILY))
    if kind == "gated":
        shapes = tuple(shape for shape in shapes if shape.may_be_gated)
    for shape in shapes:
        m, n, _ = odd_sizes(shape)
        division = Division(shape, (m, n, 3 * shape.depth - 56), shape.columns, 1, 3)
        operands = given_to(kind, division, shapes=shapes)
        check(emulated(kind, "bfloat16", shapes), *operands)


MIXED = [
    # shapes of y and of z; without --all those that leave and find most in the buffer
    (first, second, [] if {first, second} & {1, 3} == {1, 3} else [exhaustive])
    for first in range(4)
    for second in range(4)
]


@cache
def mixed():
    return Emulator(two_matmuls(1), workers=2)


@pytest.mark.parametrize(
    ("first", "second"), [pytest.param(a, b, marks=marks) for a, b, marks in MIXED]
)
def test_tiles_of_several_shapes_follow_one_another(first, second):
    [inputs], [y], _ = matmul(141, 328, 264)
    active = silu(y.expected)
    answers = y, Answer(active * y.expected, np.abs(active) * y.magnitude)
    dims = {"m": 141, "n": 328, "k": 264}
    for name, number in (("y", first), ("z", second)):
        shape = GATED_KINDS[number]
        dims[f"{name}_shape"] = number
        columns = 112 if shape == HALVES and name == "y" else shape.columns
        dims[f"{name}_column_groups"] = columns // 8
        dims[f"{name}_split_tile_columns"] = 1
        dims[f"{name}_parts"] = min(2, -(-264 // shape.depth))
    for seed in SEEDS:
        [outputs] = mixed().run([inputs], dims, seed=seed, runs=2)
        for name, answer in zip("yz", answers, strict=True):
            answer.check(outputs[name])


def test_stored_tiles_are_read_by_other_tasks():
    operands = signs(141, 264)
    check(Emulator(chained(1, shapes=[TALL]), workers=4), *operands)


def test_each_rank_divides_its_own_tiles():
    shapes, division = (HALVES,), BY_KIND["nk"]["halves"]
    [arrays], [answer], dims = given_to("nk", division, shapes=shapes)
    negative = {**arrays, "x": -arrays["x"]}
    answers = [answer, Answer(-answer.expected, answer.magnitude)]
    graph = matmul_graph(2, shapes=shapes)
    check(Emulator(graph, workers=3), [arrays, negative], answers, dims)


def test_sums_that_wait_for_no_part_are_reported():
    graph = without(
        graph_of("nk", shapes=(HALVES,)), "parts_stored", "waits", "notifies"
    )
    division = Division(HALVES, (93, 392, 584), 128, 2, 3)
    inputs, _, dims = given_to("nk", division, shapes=(HALVES,))
    with pytest.raises(EmulationError, match="a data race at sums"):
        Emulator(graph, workers=3).run(inputs, dims)


@pytest.mark.exhaustive  # .ci/run builds such a program
def test_gated_tiles_of_most_registers_may_have_parts():
    largest = TileShape(256, 128, swapped=True), TileShape(128, 256)
    check_compiled(graph_of("gated", shapes=largest))
