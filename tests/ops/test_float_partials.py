"""GEMM + Reduce-Scatter with partial sums in fp32, on the backend of the world."""

from __future__ import annotations

import numpy as np
import pytest

import etc_dist
from etc_dist import MatmulReduceScatter
from etc_dist.errors import ArgumentError
from tests.conftest import first_always

pytestmark = pytest.mark.mpi


@pytest.mark.mpi(ranks=[1, 4])
@pytest.mark.parametrize(
    ("rows", "n", "k"), first_always([(40, 520, 72), (1, 8, 8), (264, 96, 136)], 1)
)
def test_small_integers_are_summed_exactly(rows, n, k, world, make, problem):
    op = make(MatmulReduceScatter, partials="float32")
    p = problem(MatmulReduceScatter, (rows * world.size, n, k))
    op(p.x, p.w, p.out)
    op.synchronize()
    p.check_exact(p.out)


@pytest.mark.mpi(ranks=[2])
def test_partial_sums_may_be_larger_than_float16(world, arrays):
    sign = {0: 1, 1: -1}.get(world.rank, 0)
    x = arrays.put_as(np.full((2 * world.size, 8), 200 * sign, np.float32), "float16")
    w = arrays.put_as(np.full((8, 8), 43.75, np.float32), "float16")
    out = etc_dist.matmul_reduce_scatter(x, w, partials="float32")
    assert (arrays.get(out) == 0).all()


@pytest.mark.parametrize("partials", ["float16", ["float32"]])
def test_other_partials_are_refused(partials, world, arrays):
    kind = ArgumentError if isinstance(partials, str) else TypeError
    x = arrays.put_as(np.zeros((world.size, 8), np.float32), "bfloat16")
    with pytest.raises(kind, match="partials"):
        MatmulReduceScatter(partials=partials, world=world)
    with pytest.raises(kind, match="partials"):
        etc_dist.matmul_reduce_scatter(x, x, partials=partials)


def test_w_may_be_a_transposed_view(world, make, problem):
    op = make(MatmulReduceScatter, partials="float32")
    p = problem(MatmulReduceScatter, (8 * world.size, 16, 24), w_layout="kn")
    op(p.x, p.w, p.out)
    op.synchronize()
    p.check_exact(p.out)
