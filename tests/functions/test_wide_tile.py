"""Matrix multiplication on tiles with as many rows as their tasks."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from etc_dist.emulate import Emulator
from etc_dist.functions.activation import Activation
from etc_dist.functions.epilogue import activated, store, swiglu
from etc_dist.functions.epilogue import partial as unrounded
from etc_dist.functions.scaled_weights import E4M3, PER_BLOCK, PER_ROW, Scaling
from etc_dist.functions.tile_shape import TileShape
from etc_dist.functions.weight_layouts import silu
from etc_dist.functions.wide_tile import (
    MANY_SCALED,
    NARROW,
    STAGE_BYTES,
    WIDE,
    shapes_of_rows,
)
from etc_dist.ir import Graph, GraphFunction
from tests.graphs.calls import one_call
from tests.graphs.dense import own_rows
from tests.graphs.scaled import draw_scaled_experts
from tests.layers.reference import draw
from tests.refusals import refused

PLAIN = Activation()
CLAMPED = Activation(alpha=1.702, limit=0.5, shift=1.0)


def tiled(
    *,
    gated: bool = False,
    gathers: bool = False,
    is_biased: bool = False,
    most_rows: int = WIDE.rows,
    activation: Activation = PLAIN,
    scaling: Scaling | None = None,
) -> GraphFunction:
    """y = the rows of tile r, which `sizes` counts, by the weights of an expert."""
    is_narrow = most_rows <= NARROW.rows or scaling is not None
    num_weights, width = 1 + gated, (128 if is_narrow else 256) // (1 + gated)
    parts = f"""
        input sizes [count] int32
        input expert [count] int32
        input numbers [count * most] int32
        input x [count * most, k] bfloat16
        input w [2, {num_weights} * n, k] {"bfloat16" if scaling is None else E4M3}
        input bias [2, {num_weights} * n] bfloat16
        output y [count * most, n] bfloat16
    """
    layout = {}
    if scaling is not None:
        shape = f"{num_weights} * n, 1"
        if scaling.per == PER_BLOCK:
            shape = f"ceildiv({num_weights} * n, 128), ceildiv(k, 128)"
        parts += f"    input w_scales [2, {shape}] {scaling.dtype}\n"
        layout = {"w_layout": scaling.w_layout}
    of_scales = ["w_scales[expert.load(r), :, :]"] * (num_weights * bool(layout))
    columns = f"minimum({width}, n - j * {width})"
    of_weights = [f"span({m} * n + j * {width}, {columns})" for m in range(num_weights)]
    rows_of_tile = (WIDE if scaling is None else MANY_SCALED).rows
    rows = f"span(r * most, minimum({rows_of_tile}, sizes.load(r)))"
    return one_call(
        1,
        partial(
            own_rows,
            epilogue=activated(activation) if gated else store,
            most_rows=most_rows,
            gathers=gathers,
            is_biased=is_biased,
            **layout,
        ),
        [
            "x[:, :]" if gathers else f"x[{rows}, :]",
            *(f"w[expert.load(r), {part}, :]" for part in of_weights),
            *of_scales,
            *(f"bias[expert.load(r), {part}]" for part in of_weights if is_biased),
            *([f"numbers[{rows}]"] if gathers else []),
        ],
        [f"y[{rows}, span(j * {width}, {columns})]"],
        dims="count most k n",
        parts=parts,
        grid=f"j: ceildiv(n, {width}), r: count",
    )


def expected(
    arrays: dict[str, Any], most: int, options: dict[str, Any]
) -> dict[int, Any]:
    """The rows of each tile that has some."""
    results = {}
    for t, (size, expert) in enumerate(
        zip(arrays["sizes"], arrays["expert"], strict=True)
    ):
        rows = np.arange(t * most, t * most + size)
        rows = arrays["numbers"][rows] if options.get("gathers") else rows
        sums = (
            arrays["x"][rows].astype(np.float32)
            @ arrays["wide"][expert].astype(np.float32).T
        )
        if options.get("is_biased"):
            sums += arrays["bias"][expert].astype(np.float32)
        if options.get("gated"):
            sums = options.get("activation", PLAIN).apply(*np.split(sums, 2, axis=1))
        results[t] = sums
    return results


# Options, the rows of tiles, k and n: a part of a tile, of a stage and of a box.
CASES: dict[str, tuple[dict[str, Any], list[int], tuple[int, int]]] = {
    "plain": ({}, [0, 1, 16, 17, 144, 100], (136, 328)),
    "half a tile": ({"is_biased": True}, [5, 70], (72, 104)),
    "gated": ({"gated": True, "activation": CLAMPED}, [33, 128, 0, 7], (64, 200)),
    "gathered": ({"gated": True, "gathers": True}, [3, 8, 9, 144, 0, 20], (200, 72)),
    "biased": (
        {"gated": True, "gathers": True, "is_biased": True},
        [60, 2],
        (64, 136),
    ),
    "few": ({"most_rows": 16, "is_biased": True}, [1, 0, 16, 9], (200, 200)),
    "few gathered": (
        {"most_rows": 16, "gated": True, "gathers": True, "is_biased": True},
        [8, 1, 16, 9],
        (136, 104),
    ),
}


BLOCKS, ROWS = Scaling(PER_BLOCK, "float32"), Scaling(PER_ROW, "bfloat16")
# The scales of up begin within a block, and those of the last tile end within one.
SCALED: dict[str, tuple[dict[str, Any], list[int], tuple[int, int]]] = {
    "scaled": ({"scaling": BLOCKS}, [0, 1, 17, 128, 70], (272, 328)),
    "scaled gathered": (
        {"scaling": BLOCKS, "gated": True, "gathers": True},
        [3, 8, 9, 128, 0, 20],
        (400, 200),
    ),
    "scaled rows": (
        {"scaling": ROWS, "gated": True, "is_biased": True, "activation": CLAMPED},
        [60, 2],
        (144, 136),
    ),
    "some scaled gathered": (
        {"scaling": BLOCKS, "most_rows": 32, "gated": True, "gathers": True},
        [32, 1, 16, 9],
        (656, 104),
    ),
    "few scaled gathered": (
        {"scaling": BLOCKS, "most_rows": 16, "gated": True, "gathers": True},
        [8, 1, 16, 9],
        (656, 104),
    ),
    "few scaled rows": (
        {"scaling": ROWS, "most_rows": 16, "is_biased": True},
        [1, 0, 16],
        (272, 200),
    ),
}


OF_LAYERS = {"plain", "gathered", "few gathered", "scaled", "few scaled rows"}
"""Cases like those of mixtures, which test_kernels.py and test_moe_float8.py run."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.exhaustive] if name in OF_LAYERS else [])
        for name in (*CASES, *SCALED)
    ],
)
def test_tiles_have_the_rows_of_their_tasks(name, rng):
    options, sizes, (k, n) = {**CASES, **SCALED}[name]
    num_tasks, most, halves = len(sizes), max(sizes), 1 + options.get("gated", False)
    arrays = {
        "sizes": np.array(sizes, np.int32),
        "expert": (np.arange(num_tasks) % 2).astype(np.int32),
        "numbers": rng.permutation(num_tasks * most).astype(np.int32),
        "x": draw(rng, (num_tasks * most, k), "bfloat16"),
        "w": draw(rng, (2, halves * n, k), "bfloat16"),
        "bias": draw(rng, (2, halves * n), "bfloat16"),
    }
    wide = arrays["w"]
    if "scaling" in options:
        drawn = draw_scaled_experts(rng, 2, halves * n, k, options["scaling"])
        arrays["w"], arrays["w_scales"], wide = drawn
    program = Emulator(tiled(**options), workers=2)
    dims = {"count": num_tasks, "most": most, "k": k, "n": n}
    [outputs] = program.run([arrays], dims, runs=2)
    y = outputs["y"].astype(np.float32).reshape(num_tasks, most, n)
    for t, rows in expected(arrays | {"wide": wide}, most, options).items():
        np.testing.assert_allclose(y[t, : sizes[t]], rows, rtol=2e-2, atol=2e-2)
        assert np.isnan(y[t, sizes[t] :]).all()


def body_of(*options: Any, **keywords: Any) -> Any:
    function, _ = own_rows(Graph("body", 1), *options, dtype="float16", **keywords)
    return function.body


def test_rows_are_multiplied_by_the_experts_weights():
    rows, weights = np.array([[1, 2], [0, -1]]), np.array([[3, 1], [0, 2], [1, 0]])
    y = np.empty((2, 3), np.float32)
    body_of()(rows, weights, y, packed_tile=0)
    assert y.tolist() == [[5, 4, 1], [-1, -2, 0]]


def test_gated_rows_are_gathered_by_token():
    x, tokens = np.array([[0], [1], [2]], np.float32), np.array([2, 1])
    y = np.empty((2, 1), np.float32)
    weights = np.array([[3]]), np.array([[1]])
    body_of(swiglu, gathers=True)(x, *weights, tokens, y, packed_tile=0)
    np.testing.assert_allclose(y[:, 0], silu(np.array([6.0, 3.0])) * [2, 1])


def test_stages_of_both_shapes_fit_one_size():
    assert max(shape.stage_bytes for shape in (NARROW, WIDE)) == STAGE_BYTES
    scaled_shapes = shapes_of_rows(BLOCKS.w_layout)
    assert max(shape.stage_bytes for shape in scaled_shapes) <= STAGE_BYTES


def test_shapes_that_add_in_order_leave_out_the_least_one():
    *_, last = all_shapes = shapes_of_rows(BLOCKS.w_layout)
    in_order = shapes_of_rows(BLOCKS.w_layout, in_order=True)
    assert last == MANY_SCALED and in_order == all_shapes[1:]
    assert all(shape.adds_in_order for shape in in_order)
    assert not all_shapes[0].adds_in_order


def test_wide_tiles_are_no_other_ones():
    assert WIDE.is_wide and not TileShape(144, 128, swapped=True).is_wide


def test_other_epilogues_are_refused():
    words = "do not have the epilogue|got: epilogue partial to do"
    refused(lambda: body_of(unrounded), words)
