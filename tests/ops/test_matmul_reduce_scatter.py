"""GEMM + Reduce-Scatter against NumPy, on the backend of the world."""

from __future__ import annotations

import numpy as np
import pytest

from etc_dist import MatmulReduceScatter

pytestmark = pytest.mark.mpi

# NOTE: partial sums are rounded before sending, and their sum once more: an error of
# one rounding times the root of two.
TOLERANCE = {"bfloat16": 3e-3, "float16": 3.75e-4}


@pytest.mark.parametrize("w_layout", ["nk", "kn"])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_random_values_come_close_to_fp32(dtype, w_layout, world, make, problem, rng):
    op = make(MatmulReduceScatter)
    shape = (48 * world.size, 296, 136)
    p = problem(MatmulReduceScatter, shape, dtype, w_layout, rng)
    op(p.x, p.w, p.out)
    op.synchronize()
    assert p.error(p.out) < TOLERANCE[dtype]


# Less than a tile, whole tiles, and tails of rows a rank, N and K.
@pytest.mark.parametrize("w_layout", ["nk", "kn"])
@pytest.mark.parametrize(
    ("rows", "n", "k"),
    [(1, 8, 8), (24, 256, 64), (256, 264, 8), (40, 520, 72), (264, 96, 40)],
)
def test_small_integers_are_summed_exactly(rows, n, k, w_layout, world, make, problem):
    op = make(MatmulReduceScatter)
    p = problem(MatmulReduceScatter, (rows * world.size, n, k), w_layout=w_layout)
    op(p.x, p.w, p.out)
    op.synchronize()
    p.check_exact(p.out)


def test_partial_sums_are_added_in_fp32(world, make, arrays):
    op = make(MatmulReduceScatter)
    x = np.zeros((world.size, 8), np.float32)
    x[:, 0] = 1 if world.rank else 256  # in bfloat16, 256 + 1 is 256
    x, w = arrays.put_as(x, "bfloat16"), arrays.put_as(np.eye(8), "bfloat16")
    out = op(x, w)
    op.synchronize()
    rounded = {256: 256, 257: 256, 258: 258, 259: 260, 263: 264}
    assert arrays.get(out)[0, 0] == rounded[255 + world.size]
