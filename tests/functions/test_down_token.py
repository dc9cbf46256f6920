"""The second GEMV of one token."""

from __future__ import annotations

import numpy as np
import pytest

from etc_dist.functions.down_token import down_token
from etc_dist.functions.push_rows import push_rows
from etc_dist.functions.router import Router
from etc_dist.functions.routing import Routing
from etc_dist.functions.scaled_weights import E4M3, PER_BLOCK, PER_ROW, Scaling
from etc_dist.ir.tensor import numpy_dtype
from tests.functions.both import both
from tests.graphs.calls import Task, calls


def test_results_of_the_tokens_experts_are_weighted():
    down = np.array([1, 2, 3, 4], np.float32)[:, None, None]  # of four experts
    ids, weights = np.array([[3, 0]]), np.array([[0.75, 0.25]])
    active, y = np.array([[[2.0], [8.0]]]), np.empty((1, 1), np.float32)
    body = down_token(Routing(4, Router(2), "float32")).body
    body(ids, weights, active, down, y)
    assert y.tolist() == [[8.0]]


BLOCKS, ROWS = Scaling(PER_BLOCK, "float32"), Scaling(PER_ROW, "bfloat16")


def scaled_graph(scaling, dtype, num_experts, num_choices):
    """Of float8 weights."""
    routing = Routing(num_experts, Router(num_choices), dtype)
    operand = f"given 1 {num_choices} k {dtype}"
    tasks = [
        Task(
            push_rows(),
            [operand],
            [f"active 1 {num_choices} k {dtype}"],
            notifies=["done[0]"],
        ),
        Task(
            down_token(routing, scaling=scaling),
            [
                f"ids 1 {num_choices} int32",
                f"weights 1 4[:{num_choices}] float32",
                f"active 1 {num_choices} k {dtype}",
                f"down {num_experts} n k {E4M3}",
                f"scales {num_experts} r c {scaling.dtype}",
            ],
            [f"y 1 n {dtype}"],
            waits=["done[0]"],
        ),
    ]
    of_active = {"active": "local"}
    return calls(1, tasks=tasks, parts="events done [1] expects 1", kinds=of_active)


def scaled_inputs(scaling, dtype, ids, weights, down, scales, active):
    """The inputs of this graph, and its dims."""
    _, n, k = down.shape
    arrays = {
        "ids": np.array([ids], np.int32),
        "weights": np.resize(weights, (1, 4)).astype(np.float32),
        "given": active.astype(numpy_dtype(dtype)),
        "down": down,
        "scales": scales.astype(numpy_dtype(scaling.dtype)),
    }
    return arrays, {"n": n, "k": k, "r": scales.shape[1], "c": scales.shape[2]}


def scaled(scaling, dtype, ids, weights, down, scales, active):
    """The results of both bodies for float8 weights."""
    graph = scaled_graph(scaling, dtype, len(down), len(ids))
    inputs = scaled_inputs(scaling, dtype, ids, weights, down, scales, active)
    for outputs in both(graph, *inputs):
        yield outputs["y"][0].astype(np.float32)


OCTAVES = [(-133, 127), (29, 60), (-133, -108), (-14, 20)]
"""The least and the largest exponent of the activations in 256 columns: all of bf16; as
many as are multiplied as numbers of float16; the least ones; some more octaves."""


def rows_of_octaves():
    """Inputs of which each number of y is one of the activations, among zeros."""
    rng, count = np.random.default_rng(8), 64
    active = np.zeros((1, 1, 256 * len(OCTAVES)))
    down = np.zeros((1, count * len(OCTAVES), active.size))
    for i, (least, most) in enumerate(OCTAVES):
        exponents = np.append(rng.integers(least, most, count - 2), [least, most])
        columns = 256 * i + rng.permutation(256)[:count]
        fractions = (2 * rng.integers(0, 64, count) + 1) / 128  # to the last bit
        sizes = np.exp2(exponents) * (1 + fractions)
        active[0, 0, columns] = sizes * rng.choice([-1, 1], count)
        down[0, count * i + np.arange(count), columns] = 1
    down, scales = down.astype(numpy_dtype(E4M3)), np.ones((1, 2, 8))
    return scaled_inputs(BLOCKS, "bfloat16", [0], [1.0], down, scales, active)


@pytest.mark.parametrize(
    ("scaling", "dtype"), [(BLOCKS, "bfloat16"), (ROWS, "float16")], ids=str
)
def test_all_codes_are_widened_exactly(scaling, dtype):
    """Each code at another place of a step; NaN stays NaN."""
    rows = np.arange(256)
    codes = np.zeros((2, 256, 128), np.uint8)
    codes[1, rows, rows * 37 % 128] = rows
    down = codes.view(numpy_dtype(E4M3))
    scales = np.ones((2, 256 if scaling == ROWS else 2, 1))
    expected = rows.astype(np.uint8).view(down.dtype).astype(np.float32)
    assert np.isnan(expected).sum() == 2
    active = np.ones((1, 1, 128))
    for y in scaled(scaling, dtype, [1], [1.0], down, scales, active):
        np.testing.assert_array_equal(y, expected)


def test_each_block_of_each_expert_has_its_own_scale(rng):
    """Of powers of two, of 0 and of NaN; the last blocks are cut, and warps have more
    steps than are loaded ahead."""
    n, k = 392, 5 * 1024 + 144
    scales = np.exp2(rng.integers(-3, 4, (3, 4, 42)))
    scales[2, 1, 3], scales[0, 2, 40], scales[0, 3, 41] = 0, np.nan, -2
    down = np.ones((3, n, k), numpy_dtype(E4M3))
    active = np.ones((1, 2, k)) * np.array([[[1.0], [0.5]]])
    blocks = scales[[2, 0]].repeat(128, 1)[:, :n] * ([128] * 41 + [16])
    sums = np.einsum("enb,e->n", blocks, [0.25 * 1.0, 2.0 * 0.5])
    expected = sums.astype(numpy_dtype("bfloat16")).astype(np.float32)
    assert np.isnan(expected).sum() == 128
    for y in scaled(BLOCKS, "bfloat16", [2, 0], [0.25, 2.0], down, scales, active):
        np.testing.assert_array_equal(y, expected)


def test_activations_of_any_octaves_are_multiplied_exactly():
    arrays, dims = rows_of_octaves()
    numbers = arrays["given"][arrays["given"] != 0]
    assert len(numbers) == 256
    for outputs in both(scaled_graph(BLOCKS, "bfloat16", 1, 1), arrays, dims):
        y = outputs["y"][0].astype(np.float64)
        assert sorted(y) == sorted(numbers.astype(np.float64))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_infinite_activations_stay(dtype):
    """In rows with numbers of many octaves; times 0 they are NaN."""
    active = np.exp2(np.arange(256) % 24 - 12.0)[None, None]
    active[0, 0, 5] = np.inf
    down = np.ones((1, 8, 256))
    down[0, :, 5] = [2, -2, 0, np.nan] * 2
    down, scales = down.astype(numpy_dtype(E4M3)), np.ones((1, 8, 1))
    for y in scaled(ROWS, dtype, [0], [1.0], down, scales, active):
        np.testing.assert_array_equal(y, [np.inf, -np.inf, np.nan, np.nan] * 2)
