"""Matmuls with float8 activations against NumPy, on the backend of the world."""

from __future__ import annotations

import numpy as np
import pytest

import etc_dist
from etc_dist import Matmul
from etc_dist.functions.scaled_weights import E4M3, FLOAT8_SCALINGS
from etc_dist.ir.tensor import numpy_dtype
from etc_dist.ops.tile_model import (
    FAMILY,
    FLOAT8_FAMILY,
    FLOAT8_RATE,
    predictions,
    work_of,
)
from etc_dist.ops.tuning import tuning_of
from tests.graphs.scaled import answer_of, dequantized_rows, draw_scaled, expanded

pytestmark = pytest.mark.mpi(ranks=[1])

BLOCKS, ROUNDED = FLOAT8_SCALINGS.values()
TOLERANCE = {"bfloat16": 4e-3, "float16": 2e-3}
"""Of the rounding of the result, and of the tensor cores' sums of 128 products."""


@pytest.mark.parametrize("deterministic", ["run", "batch"])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("scaling", [BLOCKS, ROUNDED], ids=str)
def test_quantized_rows_come_close_to_fp64(
    scaling, dtype, deterministic, make, arrays, rng
):
    op = make(Matmul, deterministic=deterministic, activations="float8")
    # The second is one block, whose scale may also be one for all.
    for n, k in ((296, 272), (128, 112)):
        codes, scales, w = draw_scaled(rng, n, k, scaling)
        for m in (1, 40, 300):
            x = rng.standard_normal((m, k)).astype(numpy_dtype(dtype))
            y = op(arrays.put(x), arrays.put_scaled(codes, scales))
            op.synchronize()
            answer = answer_of(dequantized_rows(x), w)
            assert answer.error(arrays.get(y)) < TOLERANCE[dtype]


def test_activations_are_quantized_only_if_it_is_said(world, arrays, rng):
    codes, scales, w = draw_scaled(rng, 64, 512, BLOCKS)
    x = rng.standard_normal((70, 512)).astype(numpy_dtype("bfloat16"))
    operands, answer = (
        (arrays.put(x), arrays.put_scaled(codes, scales)),
        answer_of(x, w),
    )
    errors = []
    for options in ({}, {"activations": "16-bit"}, {"activations": "float8"}):
        y = etc_dist.matmul(*operands, **options)
        errors.append(answer.error(arrays.get(y)))
    assert errors[0] == errors[1] < 2.3e-3 < 0.01 < errors[2] < 0.03


@pytest.mark.parametrize(("m", "n", "k"), [(3, 264, 144), (250, 520, 592)])
def test_all_tiles_sum_small_integers_exactly(m, n, k, make_each_tile, arrays, rng):
    """Each with a tail of rows, columns and k; k of the last column divided for some.
    Scales are powers of two."""
    options = {"activations": "float8"}
    op, num_tiles = make_each_tile(BLOCKS.w_layout, m, k, **options)
    assert num_tiles == len(FLOAT8_FAMILY)
    codes = rng.integers(-1, 2, (n, k)).astype(numpy_dtype(E4M3))
    shape = -(-n // 128), -(-k // 128)
    scales = np.exp2(rng.integers(-2, 3, shape)).astype(np.float32)
    w = codes.astype(np.float64) * expanded(scales, n, k)
    for number in range(num_tiles):
        rows = m + number
        x = rng.integers(-1, 2, (rows, k)) * (rng.random((rows, k)) < 0.1)
        sizes = np.exp2(rng.integers(-2, 3, (rows, shape[1]))).repeat(128, 1)
        x = (448 * x * sizes[:, :k]).astype(numpy_dtype("bfloat16"))
        y = op(arrays.put(x), arrays.put_scaled(codes, scales))
        op.synchronize()
        expected = (x.astype(np.float64) @ w.T).astype(x.dtype).astype(np.float32)
        np.testing.assert_array_equal(arrays.get(y), expected)


def test_show_gives_the_tiles_of_float8_activations(make, arrays):
    op = make(Matmul, activations="float8")
    codes = np.ones((264, 144), numpy_dtype(E4M3))
    weight = arrays.put_scaled(codes, np.ones((3, 2), np.float32))
    op(arrays.put(np.ones((5, 144), numpy_dtype("bfloat16"))), weight)
    text = op.show(m=2048, n=264, k=144)
    assert f"tiles of {op.policy(2048, 264, 144)}: " in text
    assert "quantize_rows" in text


def test_the_model_counts_half_of_the_bytes(world):
    sizes, constants = (4096, 8192, 8192), tuning_of(world).tiles
    layout = BLOCKS.w_layout
    best = predictions(FLOAT8_FAMILY, sizes, 132, constants, w_layout=layout)[0]
    shape = FLOAT8_FAMILY[best.tiling.shape_idx]
    (plain,) = (
        tile_shape
        for tile_shape in FAMILY
        if (tile_shape.rows, tile_shape.columns, tile_shape.swapped)
        == (128, 160, False)
    )
    same = next(tile_shape for tile_shape in FLOAT8_FAMILY if tile_shape.columns == 160)
    tiling = best.tiling.__class__(0, 160)
    narrow, wide = (
        work_of(tile_shape, tiling, sizes, 132) for tile_shape in (same, plain)
    )
    for name in ("block_load_bytes", "worker_weight_bytes"):
        assert 2 * getattr(narrow, name) == getattr(wide, name)
    assert narrow.block_cycles * FLOAT8_RATE == pytest.approx(wide.block_cycles)
    # Of the first eight rows of tiles.
    assert (narrow.quantized, wide.quantized) == (1024 * 8192, 0)
    assert shape.columns >= 128
    least = predictions(FAMILY, sizes, 132, constants)[0].us
    assert 1.2 < least / best.us < FLOAT8_RATE
