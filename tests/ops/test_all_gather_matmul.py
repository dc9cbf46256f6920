"""AllGather + GEMM against NumPy, on the backend of the world."""

from __future__ import annotations

import numpy as np
import pytest

from etc_dist import AllGatherMatmul

pytestmark = pytest.mark.mpi(ranks=[4])


def test_rows_come_in_rank_order(world, make, arrays):
    op = make(AllGatherMatmul)
    x = np.full((2, 8), 1 + world.rank)
    w = np.eye(8) * (1 + world.rank)
    out = op(arrays.put_as(x, "bfloat16"), arrays.put_as(w, "bfloat16"))
    op.synchronize()
    rows = [(1 + rank) * (1 + world.rank) for rank in range(world.size)]
    assert arrays.get(out).tolist() == [[row] * 8 for row in rows for _ in range(2)]
