"""Rows of zeros."""

from __future__ import annotations

import numpy as np
import pytest

from etc_dist.emulate import Emulator
from etc_dist.functions.clear_rows import clear_rows
from etc_dist.ir.tensor import numpy_dtype
from tests.functions.compiled import check_compiled
from tests.graphs.calls import one_call


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_region_is_cleared(dtype):
    graph = one_call(
        1,
        clear_rows(dtype),
        writes=[f"y rows columns[16:] {dtype}"],
        kinds={"y": "state"},
    )
    arrays = {"y": np.full((37, 56), 9, numpy_dtype(dtype))}
    [outputs] = Emulator(graph).run([arrays], {"rows": 37, "columns": 56})
    row = [9] * 16 + [0] * 40
    np.testing.assert_array_equal(outputs["y"], np.tile(row, (37, 1)))
    check_compiled(graph)
