"""GEMM + Reduce-Scatter against NumPy, on the backend of the world."""

from __future__ import annotations

import numpy as np
import pytest

from etc_dist import MatmulReduceScatter

pytestmark = pytest.mark.mpi(ranks=[2, 4])


def test_partial_sums_are_added_in_fp32(world, make, arrays):
    op = make(MatmulReduceScatter)
    x = np.zeros((world.size, 8), np.float32)
    x[:, 0] = 1 if world.rank else 256  # in bfloat16, 256 + 1 is 256
    x, w = arrays.put_as(x, "bfloat16"), arrays.put_as(np.eye(8), "bfloat16")
    out = op(x, w)
    op.synchronize()
    rounded = {256: 256, 257: 256, 258: 258, 259: 260, 263: 264}
    assert arrays.get(out)[0, 0] == rounded[255 + world.size]
