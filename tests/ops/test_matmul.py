"""Matrix multiplication against NumPy, on the backend of the world."""

from __future__ import annotations

import pytest

import etc_dist.ops.matmul as module
from etc_dist import Matmul
from etc_dist.errors import ArgumentError
from etc_dist.ops.matmul_policy import SHAPES
from tests.conftest import first_always

pytestmark = pytest.mark.mpi

TOLERANCE = {"bfloat16": 2.1e-3, "float16": 2.7e-4}
"""One rounding, of the result; the sums are in fp32."""


@pytest.mark.parametrize("w_layout", ["nk", "kn"])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("m", [5, 100, 300])
def test_random_values_come_close_to_fp32(m, dtype, w_layout, make, problem, rng):
    op = make(Matmul)
    p = problem(Matmul, (m, 296, 136), dtype, w_layout, rng)
    op(p.x, p.w, p.out)
    op.synchronize()
    assert p.error(p.out) < TOLERANCE[dtype]


SIZES = first_always([(70, 520, 200), (3, 8, 8), (300, 1304, 584)], 2)


# All tiles of the program, at sizes with several of them and tails of M, N and K.
@pytest.mark.mpi(max_size=1)
@pytest.mark.parametrize("shape", range(len(SHAPES)))
@pytest.mark.parametrize(("m", "n", "k"), SIZES)
def test_all_tiles_sum_small_integers_exactly(
    shape, m, n, k, make, problem, monkeypatch
):
    monkeypatch.setattr(module, "choose", lambda *sizes, in_order: shape)
    op = make(Matmul)
    p = problem(Matmul, (m, n, k))
    op(p.x, p.w, p.out)
    op.synchronize()
    p.check_exact(p.out)


@pytest.mark.parametrize("sizes", [(0, 8, 8), (8, 0, 8), (8, 8, 0)])
def test_tiles_are_chosen_for_sizes_from_one_on(sizes, make, problem):
    op = make(Matmul)
    with pytest.raises(ArgumentError, match="an integer from 1 on"):
        op.policy(*sizes)
