"""Operations on float8 weights with scales against NumPy, on the backend of the world,
and making such weights."""

from __future__ import annotations

import numpy as np
import pytest

import etc_dist
from etc_dist import Matmul
from etc_dist.functions.scaled_weights import (
    E4M3,
    PER_BLOCK,
    PER_ROW,
    SCALINGS,
    Scaling,
)
from etc_dist.functions.tile_shape import shapes_for
from etc_dist.ir.tensor import numpy_dtype
from etc_dist.ops.tile_model import FAMILY, predictions, work_of
from etc_dist.ops.tuning import tuning_of
from tests.graphs.scaled import answer_of, draw_scaled, expanded

pytestmark = pytest.mark.mpi(ranks=[1])

TOLERANCE = {"bfloat16": 2.3e-3, "float16": 2.9e-4}
"""One rounding, of the result; the sums are in fp32."""


@pytest.mark.parametrize("deterministic", ["run", "batch"])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=str)
def test_random_codes_and_scales_come_close_to_fp64(
    scaling, dtype, deterministic, make, arrays, rng
):
    op = make(Matmul, deterministic=deterministic)
    codes, scales, w = draw_scaled(rng, 296, 272, scaling)
    for m in (1, 40, 300):
        x = rng.standard_normal((m, 272)).astype(numpy_dtype(dtype))
        y = op(arrays.put(x), arrays.put_scaled(codes, scales))
        op.synchronize()
        assert answer_of(x, w).error(arrays.get(y)) < TOLERANCE[dtype]


def test_one_operation_takes_weights_with_and_without_scales(make, arrays, rng):
    op, x = make(Matmul), np.ones((3, 64), numpy_dtype("bfloat16"))
    w = np.ones((24, 64), numpy_dtype("bfloat16"))
    scale = np.full((), 0.5, np.float32)
    codes = w.astype(numpy_dtype(E4M3))
    scaled = arrays.put_scaled(codes, scale)
    rows = arrays.put_scaled(codes, np.full(24, 2, np.float32))
    for weights, value in ((w, 64), (scaled, 32), (rows, 128), (scaled, 32)):
        operand = arrays.put(weights) if weights is w else weights
        assert (arrays.get(op(arrays.put(x), operand)) == value).all()


BLOCKS, ROWS = Scaling(PER_BLOCK, "float32"), Scaling(PER_ROW, "bfloat16")


@pytest.mark.parametrize(("m", "n", "k"), [(3, 264, 144), (70, 520, 592)])
@pytest.mark.parametrize("scaling", [BLOCKS, ROWS], ids=str)
def test_all_tiles_sum_small_integers_exactly(
    scaling, m, n, k, make_each_tile, arrays, rng
):
    """Each with a tail of rows, columns and k; k of the last column divided for some.
    Scales are powers of two."""
    op, num_tiles = make_each_tile(scaling.w_layout, m, k)
    codes = rng.integers(-1, 2, (n, k)).astype(numpy_dtype(E4M3))
    shape = (n, 1) if scaling is ROWS else (-(-n // 128), -(-k // 128))
    scales = np.exp2(rng.integers(-2, 3, shape)).astype(numpy_dtype(scaling.dtype))
    w = codes.astype(np.float64) * expanded(scales, n, k)
    for number in range(num_tiles):
        x = rng.integers(-1, 2, (m + number, k)) * (rng.random((m + number, k)) < 0.1)
        x = x.astype(numpy_dtype("bfloat16"))
        y = op(arrays.put(x), arrays.put_scaled(codes, scales))
        op.synchronize()
        expected = (x.astype(np.float64) @ w.T).astype(x.dtype).astype(np.float32)
        np.testing.assert_array_equal(arrays.get(y), expected)


# NumPy rounds a row's products differently with another number of rows.
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("activations", "counts"),
    [("16-bit", (1, 5, 16, 33, 64, 100, 300)), ("float8", (1, 100, 300, 700))],
)
def test_a_row_has_the_same_bits_for_any_number_of_rows(
    activations, counts, make, arrays, rng
):
    codes, scales, _ = draw_scaled(rng, 520, 512, BLOCKS)
    w = np.concatenate([codes, -codes], 1), np.concatenate([scales, scales], 1)
    x = rng.standard_normal((counts[-1], 512)).astype(numpy_dtype("bfloat16"))
    x = np.concatenate([x, x], 1)
    op = make(Matmul, deterministic="batch", activations=activations)
    rows = [
        arrays.get(op(arrays.put(x[:m].copy()), arrays.put_scaled(*w)))[0]
        for m in counts
    ]
    for row in rows[1:]:
        np.testing.assert_array_equal(row, rows[0])


@pytest.mark.parametrize(
    ("per", "shape"), [("block", (2, 3)), ("row", (200, 1)), ("matrix", (1, 1))]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_quantize_rounds_to_the_nearest_codes(per, shape, dtype, arrays, rng):
    w = (rng.standard_normal((200, 264)) * 0.02).astype(numpy_dtype(dtype))
    w[:128, 128:256] = 0
    transposed = etc_dist.quantize(np.asfortranarray(w), per=per)
    assert all(array.flags.c_contiguous for array in transposed)
    codes, scales = etc_dist.quantize(w, per=per)
    assert (codes.shape, codes.dtype) == (w.shape, numpy_dtype(E4M3))
    assert (scales.shape, scales.dtype) == (shape, np.float32)
    scale, wide = expanded(scales, *w.shape), w.astype(np.float64)
    off = np.abs(codes.astype(np.float64) * scale - wide)
    # Half of a step: of 3 bits, or of the smallest codes.
    allowed = np.maximum(np.abs(wide) / 16, scale * 2**-10) * (1 + 1e-6)
    assert (off <= allowed).all()
    assert np.abs(codes.astype(np.float32)).max() == 448


@pytest.mark.parametrize("per", ["block", "row", "matrix"])
def test_experts_are_quantized_one_by_one(per, rng):
    w = rng.standard_normal((3, 200, 264)) * np.array([1, 8, 64])[:, None, None]
    w = w.astype(numpy_dtype("bfloat16"))
    codes, scales = etc_dist.quantize(w, per=per)
    for expert, pair in enumerate(zip(codes, scales, strict=True)):
        for array, alone in zip(
            pair, etc_dist.quantize(w[expert], per=per), strict=True
        ):
            np.testing.assert_array_equal(array.view(np.uint8), alone.view(np.uint8))


def test_an_outlier_changes_only_the_codes_of_its_block(rng):
    w = rng.standard_normal((256, 256)).astype(np.float32)
    before = etc_dist.quantize(w).codes.view(np.uint8)
    w[130, 5] = 1000
    after = etc_dist.quantize(w).codes.view(np.uint8)
    has_changed = (before != after).reshape(2, 128, 2, 128).any(axis=(1, 3))
    assert has_changed.tolist() == [[False, False], [True, False]]


def test_the_model_counts_a_byte_for_each_code(world):
    sizes, constants = (4, 8192, 8192), tuning_of(world).tiles
    layout = next(iter(SCALINGS))
    shapes = shapes_for(layout, FAMILY)
    best = predictions(shapes, sizes, 132, constants, w_layout=layout)[0]
    assert best.work.memory_bytes == 8192 * 8192 + 4 * 2 * (8192 + 8192)
    wide = work_of(FAMILY[0], best.tiling, sizes, 132)
    assert wide.worker_weight_bytes == 2 * best.work.worker_weight_bytes
