"""Copies of some columns of rows: both bodies."""

from __future__ import annotations

import numpy as np
import pytest

from etc_dist.emulate import Emulator
from etc_dist.functions.push_tile import push_tile
from etc_dist.ir import Graph, ceildiv, graph_function, tile
from etc_dist.runtime.cpu import simulate
from etc_dist.schedule import schedule_static
from tests.functions.compiled import check_compiled

ROWS, COLUMNS = 5, 264
"""Of a task: a warp has more bytes in flight than a row has, and less than a tile."""


@graph_function
def pushed(g: Graph, *, dtype: str) -> None:
    rows, columns = g.dims("rows columns")
    x = g.input("x", (2, rows, columns), dtype)
    y = g.output("y", (rows, columns), dtype)
    i, j = grid = g.grid(i=ceildiv(rows, ROWS), j=ceildiv(columns, COLUMNS))
    part = tile(i, ROWS), tile(j, COLUMNS)
    g.call(push_tile(dtype), grid, reads=[x[1, *part]], writes=[y[part]])


@pytest.mark.parametrize("columns", [8, 520, 2 * COLUMNS])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_columns_of_rows_are_copied(dtype, columns, rng):
    dims = {"rows": 2 * ROWS + 1, "columns": columns}
    x = rng.standard_normal((2, dims["rows"], columns)).astype(dtype)
    graph = pushed(1, dtype=dtype)
    simulated = simulate(schedule_static(graph), [{"x": x}], dims).outputs[0]
    emulated = Emulator(graph).run([{"x": x}], dims)[0]
    for found in (simulated, emulated):
        np.testing.assert_array_equal(found["y"], x[1])


def test_the_cuda_body_compiles_without_spills():
    check_compiled(pushed(1, dtype="float16"))
