"""A column of ones."""

from __future__ import annotations

import numpy as np
import pytest

from etc_dist.emulate import Emulator
from etc_dist.functions.ones_column import ones_column
from etc_dist.ir.tensor import numpy_dtype
from tests.functions.compiled import check_compiled
from tests.graphs.calls import one_call


@pytest.mark.parametrize(
    ("dtype", "first"), [("bfloat16", 1), ("float16", 1), ("bfloat16", 0)]
)
def test_the_first_column_of_a_region_is_one_or_zero(dtype, first):
    graph = one_call(
        1,
        ones_column(dtype, first),
        writes=[f"y rows columns[16:] {dtype}"],
        kinds={"y": "state"},
    )
    arrays = {"y": np.full((37, 56), 9, numpy_dtype(dtype))}
    [outputs] = Emulator(graph).run([arrays], {"rows": 37, "columns": 56})
    row = [9] * 16 + [first] + [0] * 39
    np.testing.assert_array_equal(outputs["y"], np.tile(row, (37, 1)))
    check_compiled(graph)
