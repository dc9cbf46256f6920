"""The largest number of each row: both bodies against NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from etc_dist.emulate import Emulator
from etc_dist.functions.best_column import (
    NO_TOKEN,
    NOT_FINITE,
    best_column,
    next_token,
    unpadded_tile,
)
from etc_dist.ir import Graph, ceildiv, graph_function
from etc_dist.ir.tensor import numpy_dtype
from etc_dist.models.decoder_ranks import best_of_ranks
from etc_dist.runtime.cpu import simulate
from etc_dist.schedule import schedule_static
from tests.functions.compiled import check_compiled

WIDTH = 64


@graph_function
def argmax(g: Graph, *, dtype: str) -> None:
    """best [rows]: the first of `count` columns of x with the largest number."""
    stops, count = g.dims("stops count")
    rows, columns = g.dims("rows columns")
    tiles = g.let("tiles", ceildiv(columns, WIDTH))
    x, best = g.input("x", (rows, columns), dtype), g.output("best", (rows,), "int32")
    position, end = (g.input(n, (rows,), "int32") for n in ("position", "end"))
    stop = g.input("stop", (rows, stops), "int32")
    after = g.output("after", (rows,), "int32")
    values = g.local("values", (rows, tiles), "float32")
    ids = g.local("ids", (rows, tiles), "int32")
    found = g.events("found", (1,), expects=tiles)
    (j,) = grid = g.grid(j=tiles)
    g.call(
        best_column(dtype),
        grid,
        reads=[unpadded_tile(x, j, WIDTH, count)],
        writes=[values[:, j], ids[:, j]],
        notifies=[found[0]],
    )
    g.call(
        next_token(WIDTH),
        g.grid(one=1),
        reads=[values[:, :], ids[:, :], position[:], end[:], stop[:, :]],
        writes=[best[:], after[:]],
        waits=[found[0]],
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_first_largest_number_is_found(dtype, rng):
    x = rng.integers(-9, 3, (20, 2600)).astype(numpy_dtype(dtype))
    x[0, :2599], x[1, 7:], x[2, 70:] = -np.inf, -np.inf, 5
    x[3, 2599] = 9
    wanted = x.astype(np.float32).argmax(axis=1)
    for outputs in both(dtype, x, rows_of(20)):
        assert outputs["best"].tolist() == wanted.tolist()
        assert outputs["after"].tolist() == [8] * 20


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("padding", [1, 7, 29])
def test_columns_of_padding_are_not_found(dtype, padding, rng):
    x = rng.integers(-9, 3, (20, 2584)).astype(numpy_dtype(dtype))
    x[0, : -padding - 1], x[1, -padding - 1] = -np.inf, 9
    wanted = x[:, :-padding].argmax(axis=1)
    x[:, -padding:] = 99
    x[3, -1] = np.nan
    for outputs in both(dtype, x, rows_of(20), padding):
        assert outputs["best"].tolist() == wanted.tolist()


def test_a_row_ends_at_its_end_or_after_a_stop_token():
    x = np.tile(np.arange(64, dtype=np.float32) % 40, (4, 1))
    rows = rows_of(4)
    rows["position"][1], rows["end"][2] = -1, 8
    rows["stop"][0, 39], rows["stop"][3] = 38, 39
    for outputs in both("float32", x, rows):
        assert outputs["best"].tolist() == [39, -1, 39, 39]
        assert outputs["after"].tolist() == [8, -1, -1, -1]


SPOILED = {
    "no finite number": (slice(None), -np.inf),
    "a NaN": (0, np.nan),
    "a NaN at the end": (2599, np.nan),
    "only NaNs": (slice(None), np.nan),
    "infinity": (1300, np.inf),
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("spoiled", SPOILED)
def test_a_row_that_is_not_finite_ends_all_rows(dtype, spoiled, rng):
    x = rng.integers(-9, 3, (20, 2600)).astype(numpy_dtype(dtype))
    columns, value = SPOILED[spoiled]
    wanted = x.argmax(axis=1)
    x[13, columns] = value
    wanted[13] = NOT_FINITE
    for outputs in both(dtype, x, rows_of(20)):
        assert outputs["best"].tolist() == wanted.tolist()
        assert outputs["after"].tolist() == [-1] * 20


def test_a_row_without_a_step_may_have_any_numbers():
    x = np.tile(np.arange(64, dtype=np.float32), (9, 1))
    x[3] = np.nan
    rows = rows_of(9)
    rows["position"][3] = -1
    for outputs in both("float32", x, rows):
        assert outputs["best"].tolist() == [63] * 3 + [NO_TOKEN] + [63] * 5
        assert outputs["after"].tolist() == [8] * 3 + [-1] + [8] * 5


def rows_of(rows):
    """Rows at position 7 of more, with 40 stop tokens that are none."""
    numbers = {"position": 7, "end": 9}
    given = {n: np.full(rows, number, np.int32) for n, number in numbers.items()}
    return given | {"stop": np.full((rows, 40), -1, np.int32)}


def both(dtype, x, rows, padding=0):
    """The outputs of both backends. padding: columns at the end of a row."""
    graph, given = argmax(1, dtype=dtype), rows | {"x": x}
    num_rows, columns = x.shape
    dims = {"rows": num_rows, "columns": columns, "stops": rows["stop"].shape[1]}
    dims["count"] = columns - padding
    yield simulate(schedule_static(graph), [given], dims).outputs[0]
    yield Emulator(graph, workers=2).run([given], dims)[0]


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
    of_ranks = best_of_ranks(g, (values, ids), WIDTH, columns, 1, 0, found[0])
    position, end = (g.input(n, (rows,), "int32") for n in ("position", "end"))
    stop, after = (
        g.input("stop", (rows, 40), "int32"),
        g.output("after", (rows,), "int32"),
    )
    g.call(
        next_token(0),
        g.grid(one=1),
        reads=[*(p[:, :] for p in of_ranks[:2]), position[:], end[:], stop[:, :]],
        writes=[best[:], after[:]],
        waits=[of_ranks[2]],
    )


def test_of_equal_numbers_on_two_ranks_the_first_one_is_found(rng):
    x = rng.integers(-9, 3, (20, 3 * WIDTH)).astype(np.float32)
    wanted = x.argmax(axis=1)
    for outputs in ranks_of(x):
        assert outputs["best"].tolist() == wanted.tolist()
        assert outputs["after"].tolist() == [8] * 20


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_all_ranks_find_a_row_that_is_not_finite_on_one(value, rng):
    x = rng.integers(-9, 3, (20, 3 * WIDTH)).astype(np.float32)
    wanted = x.argmax(axis=1)
    x[7, WIDTH + 5] = value
    wanted[7] = NOT_FINITE
    for outputs in ranks_of(x):
        assert outputs["best"].tolist() == wanted.tolist()
        assert outputs["after"].tolist() == [-1] * 20


def ranks_of(x):
    """The outputs of three ranks, of both backends."""
    graph, dims = argmax_of_ranks(3), {"rows": len(x), "columns": WIDTH}
    parts = [rows_of(len(x)) | {"x": part.copy()} for part in np.split(x, 3, axis=1)]
    yield from simulate(schedule_static(graph), parts, dims).outputs
    yield from Emulator(graph, workers=2).run(parts, dims)


@pytest.mark.parametrize(
    "dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.exhaustive)]
)
def test_the_cuda_bodies_compile_without_spills(dtype):
    check_compiled(argmax(1, dtype=dtype))
