"""A column of ones."""

from __future__ import annotations

import numpy as np
import pytest

from etc_dist.emulate import Emulator
from etc_dist.functions.ones_column import ones_column
from etc_dist.ir import graph_function, span
from etc_dist.ir.tensor import numpy_dtype
from tests.functions.compiled import check_compiled


@graph_function
def filled(g, *, dtype, first):
    rows, columns = g.dims("rows columns")
    y = g.state("y", (rows, columns), dtype)
    to = y[:, span(16, columns - 16)]
    g.call(ones_column(dtype, first), g.grid(one=1), writes=[to])


@pytest.mark.parametrize(
    ("dtype", "first"), [("bfloat16", 1), ("float16", 1), ("bfloat16", 0)]
)
def test_the_first_column_of_a_region_is_one_or_zero(dtype, first):
    graph = filled(1, dtype=dtype, first=first)
    given = {"y": np.full((37, 56), 9, numpy_dtype(dtype))}
    [found] = Emulator(graph).run([given], {"rows": 37, "columns": 56})
    wanted = [9] * 16 + [first] + [0] * 39
    np.testing.assert_array_equal(found["y"], np.tile(wanted, (37, 1)))
    check_compiled(graph)
