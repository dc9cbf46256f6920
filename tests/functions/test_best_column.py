"""The largest number of each row: both bodies against NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from etc_dist.emulate import Emulator
from etc_dist.functions.best_column import best_column, best_tile
from etc_dist.ir import Graph, ceildiv, graph_function, tile
from etc_dist.ir.tensor import numpy_dtype
from etc_dist.models.decoder_ranks import best_of_ranks
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


@graph_function
def argmax_of_ranks(g: Graph) -> None:
    """best [rows], on each rank: the first column of all ranks' x with the largest
    number, of which each rank has some."""
    rows, columns = g.dims("rows columns")
    x = g.input("x", (rows, columns), "float32")
    best = g.output("best", (rows,), "int32")
    values = g.local("values", (rows, 1), "float32")
    ids = g.local("ids", (rows, 1), "int32")
    found = g.events("found", (1,), expects=1)
    g.call(
        best_column("float32"),
        g.grid(one=1),
        reads=[x[:, :]],
        writes=[values[:, 0], ids[:, 0]],
        notifies=[found[0]],
    )
    of_ranks = best_of_ranks(g, (values, ids), WIDTH, columns, found[0])
    g.call(
        best_tile(0),
        g.grid(one=1),
        reads=[part[:, :] for part in of_ranks[:2]],
        writes=[best[:]],
        waits=[of_ranks[2]],
    )


def test_of_equal_numbers_on_two_ranks_the_first_one_is_found(rng, folder):
    x = rng.integers(-9, 3, (20, 3 * WIDTH)).astype(np.float32)
    x[0] = np.nan
    graph, dims = argmax_of_ranks(3), {"rows": 20, "columns": WIDTH}
    parts = [{"x": part.copy()} for part in np.split(x, 3, axis=1)]
    wanted = np.where(np.isnan(x), -np.inf, x).argmax(axis=1)
    for outputs in (
        simulate(schedule_static(graph), parts, dims).outputs,
        Emulator(graph, folder=folder).run(parts, dims),
    ):
        for rank in range(3):
            assert outputs[rank]["best"].tolist() == wanted.tolist()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_cuda_bodies_compile_without_spills(dtype):
    check_compiled(argmax(1, dtype=dtype))
