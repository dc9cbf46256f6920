"""Matmuls by float8 weights with float8 activations: the CUDA half, emulated."""

from __future__ import annotations

from functools import cache
from itertools import product

import numpy as np
import pytest

from etc_dist.emulate import Emulator
from etc_dist.errors import ArgumentError
from etc_dist.functions.quantize_rows import ROWS
from etc_dist.functions.scaled_weights import (
    BLOCK,
    E4M3,
    FLOAT8_SCALINGS,
    PER_BLOCK,
    Scaling,
)
from etc_dist.functions.tile_matmul import Tiles
from etc_dist.functions.tile_shape import FLOAT8_COLUMNS, TileShape, shapes_for
from etc_dist.ir import Graph
from etc_dist.ir.tensor import numpy_dtype
from etc_dist.ops.matmul import matmul_graph
from etc_dist.ops.tile_model import FAMILY, FLOAT8_FAMILY, Tiling, dims_of
from etc_dist.schedule import schedule_static
from tests.conftest import first_always, kept_proof
from tests.emulate.cases import SEEDS, check
from tests.functions.both import both
from tests.functions.compiled import check_compiled, check_wgmmas
from tests.graphs.parts import gated_parts
from tests.graphs.scaled import (
    answer_of,
    blocks_by_hand,
    cancelling_codes,
    dequantized_rows,
    draw_scaled,
    gated,
    multiplied,
    tilings,
)
from tests.refusals import refused

WIDE, ROUNDED = FLOAT8_SCALINGS.values()
NUMBERS = range(len(FLOAT8_FAMILY))
K = 720
"""Five blocks and a part."""


@cache
def emulated(scaling=WIDE, dtype="bfloat16", schedule="static"):
    layout = scaling.w_layout
    graph = matmul_graph(1, dtype=dtype, w_layout=layout, shapes=FLOAT8_FAMILY)
    return Emulator(graph, workers=2, schedule=schedule)


ALWAYS = [(WIDE, "bfloat16", number) for number in NUMBERS] + [(ROUNDED, "float16", 5)]


@pytest.mark.parametrize(
    ("scaling", "dtype", "number"),
    [
        pytest.param(*case, marks=[] if case in ALWAYS else pytest.mark.exhaustive)
        for case in product(FLOAT8_SCALINGS.values(), ("bfloat16", "float16"), NUMBERS)
    ],
    ids=str,
)
def test_each_kind_of_tile_multiplies_quantized_rows(scaling, dtype, number):
    columns = FLOAT8_COLUMNS[number]
    for tiling in tilings(number, columns, parts=3):
        operands = multiplied((131, columns + 24, K), scaling, tiling, dtype)
        check(emulated(scaling, dtype), *operands, dtype, seeds=SEEDS[number > 0 :])


GATED = tuple(shape for shape in FLOAT8_FAMILY if shape.may_be_gated)


@pytest.mark.parametrize("number", range(len(GATED)))
def test_gate_and_up_are_the_parts_of_a_tile(number):
    columns = GATED[number].columns
    graph = gated_parts(1, shapes=GATED, w_layout=WIDE.w_layout)
    program = Emulator(graph, workers=2)
    for tiling in tilings(number, columns, parts=2):
        operands = gated((131, columns // 2 + 24, 528), WIDE, tiling)
        check(program, *operands, seeds=SEEDS[number > 0 :])
    narrow = [shape for shape in FLOAT8_FAMILY if shape not in GATED]
    assert [shape.columns for shape in narrow] == [96, 112, 128]


def outputs(x, codes, scales, number=0, parts=1):
    """y of both bodies, in fp32."""
    (m, k), num_columns = x.shape, len(codes)
    tiling = Tiling(number, FLOAT8_COLUMNS[number], int(parts > 1), parts)
    dims = {"m": m, "n": num_columns, "k": k, **dims_of(tiling)}
    arrays = {"x": x, "w": codes, "w_scales": scales}
    results = both(emulated(dtype=str(x.dtype)), arrays, dims)
    return [result["y"].astype(np.float32) for result in results]


def test_all_codes_are_multiplied_by_all_codes():
    """At a place of a block each; what is not a number stays so."""
    codes = np.arange(256, dtype=np.uint8).view(numpy_dtype(E4M3))
    values = codes.astype(np.float32)
    rows = np.arange(256)
    x = np.zeros((256, BLOCK), numpy_dtype("bfloat16"))
    w = np.zeros((256, BLOCK), numpy_dtype(E4M3))
    x[:, 77], x[:, 0] = values, 448  # so that the scale is 1
    w[rows, 77] = codes
    expected = (values[:, None] * values).astype(x.dtype).astype(np.float32)
    assert np.isnan(expected).sum() == 4 * 256 - 4
    for y in outputs(x, w, np.ones((2, 1), np.float32)):
        np.testing.assert_array_equal(y, expected)


@pytest.mark.parametrize("number", NUMBERS)
def test_each_block_of_rows_and_of_weights_has_its_own_scale(number):
    """Of powers of two, of 0 and of NaN; tiles begin within blocks."""
    arrays, of_blocks, (m, _, k) = blocks_by_hand(140)
    of_x = np.exp2((np.arange(m * 5).reshape(m, 5) * 5) % 7 - 3)
    x = (448 * of_x.repeat(BLOCK, 1)[:, :k]).astype(arrays["x"].dtype)
    expected = (448 * of_x @ of_blocks.T).astype(x.dtype).astype(np.float32)
    for parts in (1, 2):
        for y in outputs(x, arrays["w"], arrays["w_scales"], number, parts):
            np.testing.assert_array_equal(y, expected)


def test_a_row_with_a_number_that_is_not_finite_gives_none():
    x = np.ones((9, 272), numpy_dtype("float16"))
    x[2, 3], x[4, 200], x[8, 271] = np.nan, np.inf, -np.inf
    codes, scales = np.ones((24, 272), numpy_dtype(E4M3)), np.ones((1, 3), np.float32)
    for y in outputs(x, codes, scales):
        is_nan = np.isnan(y)
        assert is_nan[[2, 4, 8]].all() and is_nan.sum() == 3 * 24
        assert (y[[0, 1, 3, 5, 6, 7]] == 272).all()


def test_rows_of_zeros_give_zeros():
    codes = np.full((24, 144), -448, numpy_dtype(E4M3))
    x = np.zeros((3, 144), numpy_dtype("bfloat16"))
    for y in outputs(x, codes, np.full((1, 2), 2.0**100, np.float32)):
        assert (y == 0).all()


def test_tiles_of_all_widths_give_the_same_bits(rng):
    x, codes, scales = cancelling_codes(rng, 150, 200, WIDE)
    bits = set()
    for shape_idx, shape in enumerate(FLOAT8_FAMILY):
        assert shape.serves(gated=False, in_order=True)
        for m in (1, 150):
            _, y = outputs(x[:m].copy(), codes, scales, shape_idx)
            bits.add(y[0].tobytes())
    assert len(bits) == 1


ERRORS = {1: (0.02, 0.03), 100: (0.005, 0.015), 10_000: (0.002, 0.012)}
"""Of outliers by this factor, one in 1,000: the relative error against fp64 with x as
it is and the dequantized weights. An outlier has an exact code, and most of the
result."""


@pytest.mark.parametrize(("factor", "bounds"), ERRORS.items())
def test_the_error_is_that_of_the_codes(factor, bounds, rng):
    """Of 16-bit activations it is 0.002: the rounding of the result."""
    x = rng.standard_normal((64, 1024))
    x *= np.where(rng.random(x.shape) < 1e-3, factor, 1)
    x = x.astype(numpy_dtype("bfloat16"))
    codes, scales, w = draw_scaled(rng, 96, 1024, WIDE)
    exact, rounded = answer_of(x, w), answer_of(dequantized_rows(x), w)
    for y in outputs(x, codes, scales):
        assert rounded.error(y) < 2.3e-3
        assert bounds[0] < exact.error(y) < bounds[1]


def test_tiles_wait_for_the_codes_of_their_rows():
    layout = WIDE.w_layout
    plan = schedule_static(matmul_graph(1, w_layout=layout, shapes=FLOAT8_FAMILY))
    for shape_idx, (m, n, k, split, parts) in enumerate(
        [
            (130, 400, 912, 0, 1),
            (1300, 2400, 400, 1, 2),  # of 11 rows of tiles, 3 are quantized later
            (1200, 1040, 2064, 2, 3),
            (40, 96, 9008, 0, 1),
        ]
    ):
        tiling = Tiling(shape_idx, FLOAT8_COLUMNS[shape_idx], split, parts)
        dims = {"m": m, "n": n, "k": k, **dims_of(tiling)}
        assert kept_proof(plan, dims, 4).unchecked == ()
    early, later, *multiply = plan.graph.calls[:4]
    assert [call.function.lane for call in (early, later)] == ["tensor", "transfer"]
    assert not early.waits and not later.waits
    assert all(len(call.waits) == 1 for call in multiply)


def test_rows_are_quantized_while_others_are_multiplied():
    """The last one of 16 rows of tiles."""
    tiling = Tiling(5, 192)
    operands = multiplied((1930, 264, 144), WIDE, tiling)
    env = emulated().plan.graph.environment(operands[2], 0)
    assert (env["early_blocks"], env["later_rows"], env["warp_rows"]) == (15, 1920, 8)
    for schedule in ("static", "dynamic"):
        check(emulated(schedule=schedule), *operands, seeds=SEEDS[1:])


@pytest.mark.parametrize(("k", "rows"), [(1024, 8), (1040, 4), (4096, 2), (4112, 1)])
def test_a_warp_quantizes_about_as_many_elements_of_any_rows(k, rows):
    graph = emulated().plan.graph
    dims = {"m": 2000, "n": 264, "k": k, **dims_of(Tiling(0, 96))}
    assert graph.environment(dims, 0)["warp_rows"] == rows


def test_some_shapes_have_float8_activations():
    layout = WIDE.w_layout
    assert shapes_for(layout, (*FAMILY, *FLOAT8_FAMILY)) == [*FLOAT8_FAMILY]
    assert shapes_for("nk", (*FAMILY, *FLOAT8_FAMILY)) == [*FAMILY]
    widest = FLOAT8_FAMILY[-1]
    assert str(widest) == "128 x 192, float8"
    assert (widest.stage_bytes, widest.depth) == (320 * 128, BLOCK)
    assert all(shape.rows % ROWS == 0 for shape in FLOAT8_FAMILY)
    words = "no tiles serve the weights|wanted: tiles with float8=True|got: 8 x 64"
    refused(lambda: Tiles(Graph("one", 1), "tile", 0, FAMILY, w_layout=layout), words)
    for columns, options in ((176, {}), (128, {"swapped": True}), (256, {})):
        kinds = {"float8": True, **options}
        words = "GPUs have no tiles of|(5) float8: 128 rows, not swapped"
        refused(lambda n=columns, k=kinds: TileShape(128, n, **k), words, ArgumentError)


def test_a_tile_meets_at_most_two_blocks_of_weights():
    for columns in FLOAT8_COLUMNS:
        for start in range(0, columns * BLOCK, columns):
            assert (start + columns - 1) // BLOCK - start // BLOCK <= 1


# .ci/run builds all tiles.
@pytest.mark.parametrize(
    ("dtype", "shapes"),
    first_always(
        [
            ("float16", FLOAT8_FAMILY[-1:]),
            ("float16", FLOAT8_FAMILY),
            ("bfloat16", FLOAT8_FAMILY),
        ],
        1,
    ),
)
def test_a_program_of_float8_activations_compiles(dtype, shapes):
    layout = Scaling(PER_BLOCK, "bfloat16", quantizes=True).w_layout
    graph = matmul_graph(1, dtype=dtype, w_layout=layout, shapes=shapes)
    check_wgmmas(check_compiled(graph).cubin)
