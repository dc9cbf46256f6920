"""Float8 weights with scales: the CUDA half, emulated."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from etc_dist.emulate import Emulator
from etc_dist.functions.scaled_weights import (
    E4M3,
    PER_BLOCK,
    PER_MATRIX,
    PER_ROW,
    SCALINGS,
    Scaling,
)
from etc_dist.functions.tile_matmul import Tiles
from etc_dist.functions.tile_shape import TileShape, shapes_for
from etc_dist.ir import Graph
from etc_dist.ir.tensor import numpy_dtype
from etc_dist.ops.matmul import matmul_graph
from etc_dist.ops.tile_model import FAMILY, Tiling, dims_of
from tests.emulate.cases import SEEDS, check
from tests.functions.both import both, check_both
from tests.functions.compiled import check_compiled, check_wgmmas
from tests.graphs.epilogues import (
    all_kinds,
    gated_sums,
    inputs_of,
    product,
    weights_of,
)
from tests.graphs.parts import gated_parts
from tests.graphs.scaled import (
    HALVES,
    KINDS,
    NARROW_TURNS,
    TALL,
    TURNS,
    blocks_by_hand,
    cancelling_codes,
    gated,
    multiplied,
    tilings,
)
from tests.refusals import refused

exhaustive = pytest.mark.exhaustive
BLOCKS, WIDE_ROWS = Scaling(PER_BLOCK, "float32"), Scaling(PER_ROW, "float32")
ROWS = Scaling(PER_ROW, "bfloat16")
IN_ORDER = (TileShape(64, 128, swapped=True), TALL)
K = 720
"""Five blocks and a part, in stages of one or two blocks."""


@cache
def emulated(scaling, dtype="bfloat16", shapes=KINDS):
    graph = matmul_graph(1, dtype=dtype, w_layout=scaling.w_layout, shapes=shapes)
    return Emulator(graph, workers=2)


SIZES = ((0, 40), (1, 64), (2, 128), (3, 128), (0, 64), (2, 80))
"""Numbers of tiles, of which the first ones are of each kind, and columns."""
ALWAYS = {
    (BLOCKS, "bfloat16"): SIZES,
    (ROWS, "float16"): SIZES[: len(KINDS)],
}
"""The sizes that are not exhaustive."""


@pytest.mark.parametrize(
    ("scaling", "dtype", "size"),
    [
        pytest.param(scaling, dtype, size, marks=[] if is_always else exhaustive)
        for scaling in SCALINGS.values()
        for dtype in ("bfloat16", "float16")
        for size in SIZES
        for is_always in [size in ALWAYS.get((scaling, dtype), ())]
    ],
    ids=str,
)
def test_each_kind_of_tile_multiplies_by_the_scaled_weights(scaling, dtype, size):
    number, columns = size
    sizes = (KINDS[number].rows + 3, columns + 24, K)
    for tiling in tilings(number, columns, parts=3):
        operands = multiplied(sizes, scaling, tiling, dtype)
        check(emulated(scaling, dtype), *operands, dtype, seeds=SEEDS[number > 0 :])


@pytest.mark.parametrize(("scaling", "dtype"), ALWAYS, ids=str)
def test_all_codes_are_widened_exactly(scaling, dtype):
    """Each code at another place of a block; NaN stays NaN."""
    rows = np.arange(256)
    codes = np.zeros((256, 128), np.uint8)
    codes[rows, rows * 37 % 128] = rows
    w = codes.view(numpy_dtype(E4M3))
    x = np.ones((1, 128), numpy_dtype(dtype))
    scales = np.ones((256, 1) if scaling == ROWS else (2, 1), scaling.dtype)
    arrays = {"x": x, "w": w, "w_scales": scales}
    dims = {"m": 1, "n": 256, "k": 128, **dims_of(Tiling(2, 96))}
    expected = rows.astype(np.uint8).view(w.dtype).astype(x.dtype)
    assert np.isnan(expected).sum() == 2
    for outputs in both(emulated(scaling, dtype), arrays, dims):
        reference, row = (a.astype(np.float32) for a in (expected, outputs["y"][0]))
        np.testing.assert_array_equal(row, reference)


@pytest.mark.parametrize("number", range(4))
def test_each_block_has_its_own_scale(number):
    """Of powers of two, of 0 and of NaN; tiles begin within blocks."""
    arrays, of_blocks, (m, n, k) = blocks_by_hand(3)
    sums = of_blocks.sum(axis=1).astype(arrays["x"].dtype)
    columns = 24 if KINDS[number].alternates else 80
    if KINDS[number].is_tall:
        columns = 128
    dims = {"m": m, "n": n, "k": k, **dims_of(Tiling(number, columns, 1, 2))}
    for outputs in both(emulated(BLOCKS), arrays, dims):
        reference, rows = (a.astype(np.float32) for a in (sums, outputs["y"]))
        np.testing.assert_array_equal(rows, [reference] * 3)


@pytest.mark.parametrize("number", range(4))
def test_each_block_of_long_rows_has_its_scale(number):
    """Also of those after the first 32 of a warpgroup. Row r of w has every n-th block
    from r on."""
    n, blocks = (24 if KINDS[number].alternates else 80), 66
    has_block = np.arange(blocks) % n == np.arange(n)[:, None]
    scales = np.arange(blocks, dtype=np.float32)[None]
    inputs = {
        "x": np.ones((1, blocks * 128), numpy_dtype("bfloat16")),
        "w": has_block.repeat(128, 1).astype(numpy_dtype(E4M3)),
        "w_scales": scales,
    }
    columns = 128 if KINDS[number].is_tall else n
    dims = {"m": 1, "n": n, "k": blocks * 128, **dims_of(Tiling(number, columns))}
    sums = 128 * (has_block * scales).sum(axis=1)
    for outputs in both(emulated(BLOCKS), inputs, dims):
        np.testing.assert_array_equal(outputs["y"][0].astype(np.float32), sums)


def test_tiles_that_add_k_in_its_order_give_the_same_bits(rng):
    x, codes, scales = cancelling_codes(rng, 90, 264, BLOCKS)
    bits = set()
    for shape_idx, shape in enumerate(IN_ORDER):
        assert replace(shape, scaled=True).serves(gated=False, in_order=True)
        for m in (1, 5, 90):
            tiling = Tiling(shape_idx, shape.columns)
            dims = {"m": m, "n": 264, "k": x.shape[1], **dims_of(tiling)}
            arrays = {"x": x[:m].copy(), "w": codes, "w_scales": scales}
            [outputs] = emulated(BLOCKS, shapes=IN_ORDER).run([arrays], dims)
            bits.add(outputs["y"][0].tobytes())
    assert len(bits) == 1
    scaled_shapes = (
        replace(shape, scaled=True) for shape in (NARROW_TURNS, TURNS, HALVES)
    )
    assert not any(
        candidate.serves(gated=False, in_order=True) for candidate in scaled_shapes
    )


GATED = (TURNS, HALVES, TALL)


@cache
def gated_program(scaling):
    graph = gated_parts(1, shapes=GATED, w_layout=scaling.w_layout)
    return Emulator(graph, workers=2)


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize(
    "scaling", [BLOCKS, pytest.param(WIDE_ROWS, marks=exhaustive)], ids=str
)
def test_gate_and_up_have_their_own_scales(number, scaling):
    shape = GATED[number]
    for tiling in tilings(number, shape.columns, parts=2):
        operands = gated(
            (shape.rows + 3, shape.columns // 2 + 24, 272), scaling, tiling
        )
        check(gated_program(scaling), *operands, seeds=SEEDS[number > 0 :])


@pytest.mark.parametrize(
    ("what", "shapes"), [(all_kinds, (HALVES, TURNS)), (gated_sums, (HALVES,))]
)
def test_epilogues_get_the_scaled_sums(what, shapes):
    m, n, k = 40, 136, 272
    scaling = Scaling(PER_BLOCK, "bfloat16")
    graph = product(1, what=what, shapes=shapes, w_layout=scaling.w_layout)
    inputs = inputs_of(what, m, n, k)
    for weight_idx, name in enumerate(weights_of(what)):
        inputs[name] = inputs[name].astype(numpy_dtype(E4M3))
        scales = np.exp2(np.arange(6) - 3 + weight_idx).reshape(2, 3)
        inputs[f"{name}_scales"] = scales.astype(numpy_dtype("bfloat16"))
    emulator = Emulator(graph, workers=2)
    for shape in range(len(shapes)):
        check_both(emulator, inputs, {"m": m, "n": n, "k": k, "shape": shape})


def test_some_shapes_have_tiles_of_scaled_weights():
    w_layout = WIDE_ROWS.w_layout
    shapes = shapes_for(w_layout, FAMILY)
    sizes = {(shape.rows, shape.columns, shape.depth) for shape in shapes}
    assert {rows for rows, *_ in sizes} == {8, 16, 32, 64, 80, 96, 128}
    assert (64, 128, 256) in sizes and (128, 128, 128) in sizes
    assert str(shapes[0]) == "8 x 64, swapped, scaled"
    assert shapes[0].stage_bytes == (2 * 8 + 64) * 256
    wide = TileShape(128, 160)
    words = "no tiles serve the weights|wanted: tiles with may_be_scaled|got: 128 x 160"
    refused(lambda: Tiles(Graph("one", 1), "tile", 0, [wide], w_layout=w_layout), words)


def test_a_program_of_scaled_weights_compiles():
    layout = Scaling(PER_MATRIX, "float32").w_layout
    graph = matmul_graph(1, w_layout=layout, shapes=[TURNS, TALL])
    check_wgmmas(check_compiled(graph).cubin)
