"""The largest number of each row: both bodies against NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from etc_dist.emulate import Emulator
from etc_dist.functions.best_column import best_column, best_tile
from etc_dist.ir import Graph, ceildiv, graph_function, tile
from etc_dist.ir.tensor import numpy_dtype
from etc_dist.runtime.cpu import simulate
from etc_dist.schedule import schedule_static
from tests.functions.compiled import check_compiled

WIDTH = 64


@graph_function
def argmax(g: Graph, *, dtype: str) -> None:
    """best [rows]: the first column of x [rows, columns] with the largest number."""
    rows, columns = g.dims("rows columns")
    tiles = g.let("tiles", ceildiv(columns, WIDTH))
    x, best = g.input("x", (rows, columns), dtype), g.output("best", (rows,), "int32")
    values = g.local("values", (rows, tiles), "float32")
    ids = g.local("ids", (rows, tiles), "int32")
    found = g.events("found", (1,), expects=tiles)
    (j,) = grid = g.grid(j=tiles)
    g.call(
        best_column(dtype),
        grid,
        reads=[x[:, tile(j, WIDTH)]],
        writes=[values[:, j], ids[:, j]],
        notifies=[found[0]],
    )
    g.call(
        best_tile(WIDTH),
        g.grid(one=1),
        reads=[values[:, :], ids[:, :]],
        writes=[best[:]],
        waits=[found[0]],
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_first_largest_number_is_found(dtype, rng):
    x = rng.integers(-9, 3, (20, 2600)).astype(numpy_dtype(dtype))
    x[0], x[1, 7:], x[2, 70:] = -np.inf, np.nan, 5
    x[3, 2599] = np.inf
    graph, dims = argmax(1, dtype=dtype), {"rows": 20, "columns": 2600}
    wanted = np.nanargmax(x.astype(np.float32), axis=1)
    for outputs in (
        simulate(schedule_static(graph), [{"x": x}], dims).outputs[0],
        Emulator(graph).run([{"x": x}], dims)[0],
    ):
        assert outputs["best"].tolist() == wanted.tolist()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_cuda_bodies_compile_without_spills(dtype):
    check_compiled(argmax(1, dtype=dtype))
