"""Operations on float8 weights with scales against NumPy, on the backend of the world,
and making such weights."""

from __future__ import annotations

import numpy as np
import pytest

import etc_dist
from etc_dist import Matmul
from etc_dist.functions.scaled_weights import E4M3, SCALINGS
from etc_dist.functions.tile_matmul import shapes_for
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
    for weights, wanted in ((w, 64), (scaled, 32), (rows, 128), (scaled, 32)):
        given = arrays.put(weights) if weights is w else weights
        assert (arrays.get(op(arrays.put(x), given)) == wanted).all()


@pytest.mark.parametrize(
    ("per", "shape"), [("block", (2, 3)), ("row", (200, 1)), ("matrix", (1, 1))]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_quantize_rounds_to_the_nearest_codes(per, shape, dtype, arrays, rng):
    w = (rng.standard_normal((200, 264)) * 0.02).astype(numpy_dtype(dtype))
    w[:128, 128:256] = 0
    codes, scales = etc_dist.quantize(w, per=per)
    assert (codes.shape, codes.dtype) == (w.shape, numpy_dtype(E4M3))
    assert (scales.shape, scales.dtype) == (shape, np.float32)
    scale, wide = expanded(scales, *w.shape), w.astype(np.float64)
    off = np.abs(codes.astype(np.float64) * scale - wide)
    # Half of a step: of 3 bits, or of the smallest codes.
    allowed = np.maximum(np.abs(wide) / 16, scale * 2**-10) * (1 + 1e-6)
    assert (off <= allowed).all()
    assert np.abs(codes.astype(np.float32)).max() == 448


def test_an_outlier_changes_only_the_codes_of_its_block(rng):
    w = rng.standard_normal((256, 256)).astype(np.float32)
    before = etc_dist.quantize(w).codes.view(np.uint8)
    w[130, 5] = 1000
    after = etc_dist.quantize(w).codes.view(np.uint8)
    changed = (before != after).reshape(2, 128, 2, 128).any(axis=(1, 3))
    assert changed.tolist() == [[False, False], [True, False]]


def test_the_model_counts_a_byte_for_each_code(world):
    sizes, constants = (4, 8192, 8192), tuning_of(world).tiles
    layout = next(iter(SCALINGS))
    shapes = shapes_for(layout, FAMILY)
    best = predictions(shapes, sizes, 132, constants, w_layout=layout)[0]
    assert best.work.memory_bytes == 8192 * 8192 + 4 * 2 * (8192 + 8192)
    wide = work_of(FAMILY[0], best.tiling, sizes, 132)
    assert wide.worker_weight_bytes == 2 * best.work.worker_weight_bytes
