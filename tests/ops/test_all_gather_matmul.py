"""AllGather + GEMM against NumPy, on the backend of the world."""

from __future__ import annotations

import numpy as np
import pytest

from etc_dist import AllGatherMatmul

pytestmark = pytest.mark.mpi

TOLERANCE = {"bfloat16": 2.1e-3, "float16": 2.7e-4}
"""One rounding, of the result; the sums are in fp32."""


@pytest.mark.parametrize("w_layout", ["nk", "kn"])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_random_values_come_close_to_fp32(dtype, w_layout, world, make, problem, rng):
    op = make(AllGatherMatmul)
    shape = (48 * world.size, 296, 136)
    p = problem(AllGatherMatmul, shape, dtype, w_layout, rng)
    op(p.x, p.w, p.out)
    op.synchronize()
    assert p.error(p.out) < TOLERANCE[dtype]


# Less than a tile, whole tiles, and tails of rows a rank, N and K. The last has rows
# that are longer than what one push takes.
@pytest.mark.parametrize("w_layout", ["nk", "kn"])
@pytest.mark.parametrize(
    ("rows", "n", "k"),
    [
        (1, 8, 8),
        (24, 256, 64),
        (256, 264, 8),
        (40, 520, 72),
        (264, 96, 40),
        (3, 16, 16392),
    ],
)
def test_small_integers_are_summed_exactly(rows, n, k, w_layout, world, make, problem):
    op = make(AllGatherMatmul)
    p = problem(AllGatherMatmul, (rows * world.size, n, k), w_layout=w_layout)
    op(p.x, p.w, p.out)
    op.synchronize()
    p.check_exact(p.out)


def test_rows_come_in_rank_order(world, make, arrays):
    op = make(AllGatherMatmul)
    x = np.full((2, 8), 1 + world.rank)
    w = np.eye(8) * (1 + world.rank)
    out = op(arrays.put_as(x, "bfloat16"), arrays.put_as(w, "bfloat16"))
    op.synchronize()
    rows = [(1 + rank) * (1 + world.rank) for rank in range(world.size)]
    assert arrays.get(out).tolist() == [[row] * 8 for row in rows for _ in range(2)]
