"""Copies of some columns of rows: both bodies."""

from __future__ import annotations

import numpy as np
import pytest

from etc_dist.functions.push_tile import push_tile
from tests.functions.both import both
from tests.functions.compiled import check_compiled
from tests.graphs.calls import one_call

ROWS, COLUMNS = 5, 264
"""Of a task: a warp has more bytes in flight than a row has, and less than a tile."""


def pushed(dtype):
    part = f"rows/{ROWS} columns/{COLUMNS} {dtype}"
    operands = {"reads": [f"x 2[1] {part}"], "writes": [f"y {part}"]}
    return one_call(1, push_tile(dtype), **operands)


@pytest.mark.parametrize("columns", [8, 520, 2 * COLUMNS])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_columns_of_rows_are_copied(dtype, columns, rng):
    dims = {"rows": 2 * ROWS + 1, "columns": columns}
    x = rng.standard_normal((2, dims["rows"], columns)).astype(dtype)
    for outputs in both(pushed(dtype), {"x": x}, dims):
        np.testing.assert_array_equal(outputs["y"], x[1])


def test_the_cuda_body_compiles_without_spills():
    check_compiled(pushed("float16"))
