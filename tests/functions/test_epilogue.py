"""Epilogues of matrix multiplications: the CUDA halves, emulated, against NumPy."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from etc_dist.emulate import Emulator
from etc_dist.functions.activation import GELU_TANH, Activation
from etc_dist.functions.epilogue import (
    activated,
    partial,
    residual,
    row_squares,
    soft_cap,
)
from etc_dist.functions.tile_shape import TileShape
from etc_dist.ir.tensor import numpy_dtype
from etc_dist.ops.tile_model import FAMILY
from etc_dist.runtime.cpu import simulate
from etc_dist.schedule import schedule_static
from tests.functions.both import both, check_both
from tests.functions.compiled import check_compiled
from tests.functions.sizes import odd_sizes
from tests.graphs.epilogues import (
    all_kinds,
    applied_given,
    gated_sums,
    inputs_of,
    only_rounded,
    product,
    unchanged,
)
from tests.graphs.summed import summed, summed_given

FEW = (
    TileShape(64, 64, swapped=True),
    TileShape(8, 40, swapped=True),
    TileShape(64, 128, swapped=True),
    TileShape(144, 128, swapped=True),
    TileShape(128, 128),
)
"""Tiles whose warpgroups alternate, narrow ones, halves of the columns, many rows, and
rows of x."""
CAPPED = soft_cap(2.0)
ACTIVATIONS = Activation(GELU_TANH), Activation(alpha=1.702, limit=0.5, shift=1.0)
ACTIVATED_SHAPES = TileShape(64, 128, swapped=True), TileShape(128, 128)
OTHERS = [partial, residual, row_squares]
GATED_SHAPES = tuple(shape for shape in FAMILY if shape.may_be_gated)
EVERY = [(all_kinds, FAMILY), (gated_sums, GATED_SHAPES)]
exhaustive = pytest.mark.exhaustive


def graph_of(what, shapes):
    return product(1, what=what, shapes=shapes, y_dtype=what.dtype)


@cache
def emulated(what, shapes):
    return Emulator(graph_of(what, shapes), workers=2)


def str_of(value):
    return f"{len(value)} shapes" if isinstance(value, tuple) else str(value)


# tests/functions/test_tile_matmul.py has those that store and gate.
@pytest.mark.parametrize(
    ("what", "shapes"),
    [
        (gated_sums, tuple(shape for shape in FEW if shape.may_be_gated)),
        (only_rounded, tuple(shape for shape in FEW if shape.may_be_gated)),
        (all_kinds, FEW),
        *((activated(of), ACTIVATED_SHAPES) for of in ACTIVATIONS),
        (CAPPED, (TileShape(64, 64, swapped=True), TileShape(128, 128))),
        *(pytest.param(*case, marks=exhaustive) for case in EVERY),
        *(pytest.param(what, FAMILY, marks=exhaustive) for what in OTHERS),
    ],
    ids=str_of,
)
def test_both_halves_give_the_same_on_every_shape(what, shapes):
    emulator = emulated(what, shapes)
    for shape_idx, shape in enumerate(shapes):
        for size in odd_sizes(shape), (4, 8, 72):
            inputs = inputs_of(what, *size)
            dims = {**dict(zip("mnk", size, strict=True)), "shape": shape_idx}
            check_both(emulator, inputs, dims)


def test_float8_is_rounded_alike_and_ends_at_the_largest_number():
    numbers = [448, 460, 464, 500, -1e30, np.nan, np.inf, 0.3]
    x, w = np.zeros((8, 8)), np.ones((16, 8))
    x[:, 0] = numbers
    inputs = {n: a.astype(numpy_dtype("bfloat16")) for n, a in (("x", x), ("w", w))}
    emulator = emulated(unchanged, FEW[1:2])
    dims = {"m": 8, "n": 16, "k": 8, "shape": 0}
    column = [448, 448, 448, 448, -448, np.nan, 448, 0.3125]
    for outputs in both(emulator, inputs, dims):
        np.testing.assert_array_equal(outputs["y"][:, 0].astype(np.float32), column)


@pytest.mark.parametrize("shape", [FEW[0], pytest.param(FEW[-1], marks=exhaustive)])
def test_arrays_may_be_matrices_of_stacks(shape):
    once = inputs_of(all_kinds, 72, 80, 72)
    inputs = {name: np.stack([a, a[::-1]]) for name, a in once.items()}
    dims = {"matrices": 2, "m": 72, "n": 80, "k": 72, "shape": 0}
    check_both(product(1, what=all_kinds, shapes=[shape], stacked=True), inputs, dims)


@pytest.mark.parametrize(
    ("ranks", "schedule"), [(3, "static"), pytest.param(2, "dynamic", marks=exhaustive)]
)
def test_a_tile_is_stored_on_all_ranks(ranks, schedule):
    graph = summed(ranks, shapes=FEW)
    emulator = Emulator(graph, schedule=schedule, workers=2)
    inputs, answers = summed_given(ranks, 20, 136, 72)
    for shape in range(len(FEW)):
        dims = {"m": 20, "n": 136, "k": 72, "shape": shape}
        expected = simulate(emulator.plan, inputs, dims).outputs
        results = emulator.run(inputs, dims, seed=shape, runs=2)
        for rank in range(ranks):
            answers[rank].check(expected[rank]["y"], "bfloat16")
            answers[rank].check(results[rank]["y"], "bfloat16")
            np.testing.assert_array_equal(results[rank]["y"], results[0]["y"])


@pytest.mark.parametrize("shape", [TileShape(64, 128, swapped=True), FAMILY[-1]])
def test_numpy_half_reduces_each_strip(shape):
    inputs, [answer], dims = applied_given(40, 328, 72, shape)
    plan = schedule_static(product(1, what=all_kinds, shapes=[shape]))
    answer.check(simulate(plan, inputs, dims).outputs[0]["y"])


@pytest.mark.parametrize(
    ("what", "shapes"),
    [
        (all_kinds, FEW),
        *(
            pytest.param(*case, marks=exhaustive)
            for case in [*EVERY, (residual, FAMILY)]
        ),
    ],
    ids=str_of,
)
def test_every_shape_compiles_without_spills(what, shapes):
    check_compiled(graph_of(what, shapes))


def test_a_strip_is_what_one_warp_stores():
    assert TileShape(128, 192).strip_columns(gated=False) == 192
    assert TileShape(128, 128).strip_columns(gated=True) == 64
    assert TileShape(8, 128, swapped=True).strip_columns(gated=False) == 64
    assert TileShape(8, 64, swapped=True).strip_columns(gated=True) == 32
