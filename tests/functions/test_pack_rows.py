"""Copies of chosen rows to adjacent places: both bodies."""

from __future__ import annotations

import numpy as np
import pytest

from etc_dist.functions.pack_rows import PACKED_ROWS, TENSOR_ROWS, pack_rows
from etc_dist.ir.function import TENSOR, TRANSFER
from tests.functions.both import both
from tests.functions.compiled import check_compiled
from tests.graphs.calls import one_call
from tests.layers.reference import draw

# More rows in a task of the tensor lane than it has warps.
LANES = {TRANSFER: PACKED_ROWS, TENSOR: 2 * TENSOR_ROWS + 1}


def packed(lane):
    of_rows = f"rows/{LANES[lane]}"
    return one_call(
        1,
        pack_rows("bfloat16", lane),
        reads=["x tokens columns bfloat16", f"numbers {of_rows} int32"],
        writes=[f"y {of_rows} columns bfloat16"],
    )


@pytest.mark.parametrize("lane", LANES)
def test_rows_are_copied_in_the_order_of_their_numbers(lane, rng):
    # More columns than a warp has in flight, and a task of fewer rows.
    dims = {"tokens": 5, "columns": 2056, "rows": 2 * LANES[lane] + 1}
    x = draw(rng, (dims["tokens"], dims["columns"]), "bfloat16")
    numbers = rng.integers(0, dims["tokens"], dims["rows"]).astype(np.int32)
    for outputs in both(packed(lane), {"x": x, "numbers": numbers}, dims):
        np.testing.assert_array_equal(outputs["y"], x[numbers])


@pytest.mark.parametrize("lane", LANES)
def test_the_cuda_body_compiles_without_spills(lane):
    check_compiled(packed(lane))
