"""Copies of rows in float8, with their scales."""

from __future__ import annotations

import numpy as np
import pytest

from etc_dist.functions.push_scaled_rows import push_scaled_rows
from etc_dist.functions.scaled_weights import E4M3
from etc_dist.ir.tensor import numpy_dtype
from tests.functions.both import both
from tests.graphs.calls import one_call

COPY = one_call(
    1,
    push_scaled_rows(),
    [f"x rows/4 k {E4M3}", "x_scales rows/4 blocks float32"],
    [f"y rows/4 k {E4M3}", "y_scales rows/4 blocks float32"],
    dims="k blocks",
)


# Of rows of scales, only some are of a multiple of 16 bytes.
@pytest.mark.parametrize("k", [256, 272, 512])
def test_codes_and_scales_are_copied(k, rng):
    num_blocks = -(-k // 128)
    x = rng.integers(0, 127, (10, k)).astype(np.uint8).view(numpy_dtype(E4M3))
    scales = rng.standard_normal((10, num_blocks)).astype(np.float32)
    inputs = {"x": x, "x_scales": scales}
    for outputs in both(COPY, inputs, {"rows": 10, "k": k, "blocks": num_blocks}):
        assert outputs["y"].tobytes() == x.tobytes()
        assert outputs["y_scales"].tobytes() == scales.tobytes()
