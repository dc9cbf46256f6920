"""The largest number of each row: both bodies against NumPy."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from etc_dist.emulate import Emulator
from etc_dist.functions.best_column import NO_TOKEN, NOT_FINITE
from etc_dist.ir.tensor import numpy_dtype
from tests.functions.both import both, both_on_ranks
from tests.functions.compiled import check_compiled
from tests.graphs.tokens import next_tokens

WIDTH = 64


@cache
def program(dtype="float32", ranks=1):
    return Emulator(next_tokens(ranks, width=WIDTH, dtype=dtype), workers=2)


DTYPES = "bfloat16", "float16", "float32"


def in_turn(cases):
    """Each case with one of the dtypes; others are exhaustive."""
    pairs = [
        pytest.param(
            *(dtype, case),
            marks=[] if case_idx % 3 == dtype_idx else pytest.mark.exhaustive,
        )
        for case_idx, case in enumerate(cases)
        for dtype_idx, dtype in enumerate(DTYPES)
    ]
    return pytest.mark.parametrize(("dtype", "case"), pairs)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_first_largest_number_is_found(dtype, rng):
    x = rng.integers(-9, 3, (20, 2600)).astype(numpy_dtype(dtype))
    x[0, :2599], x[1, 7:], x[2, 70:] = -np.inf, -np.inf, 5
    x[3, 2599] = 9
    columns = x.astype(np.float32).argmax(axis=1)
    for outputs in found_in(dtype, x, rows_of(20)):
        assert outputs["best"].tolist() == columns.tolist()
        assert outputs["after"].tolist() == [8] * 20


@in_turn([1, 7, 29])
def test_columns_of_padding_are_not_found(dtype, case, rng):
    x = rng.integers(-9, 3, (20, 2584)).astype(numpy_dtype(dtype))
    x[0, : -case - 1], x[1, -case - 1] = -np.inf, 9
    columns = x[:, :-case].argmax(axis=1)
    x[:, -case:] = 99
    x[3, -1] = np.nan
    for outputs in found_in(dtype, x, rows_of(20), case):
        assert outputs["best"].tolist() == columns.tolist()


def test_a_row_ends_at_its_end_or_after_a_stop_token():
    x = np.tile(np.arange(64, dtype=np.float32) % 40, (4, 1))
    rows = rows_of(4)
    rows["position"][1], rows["end"][2] = -1, 8
    rows["stop"][0, 39], rows["stop"][3] = 38, 39
    for outputs in found_in("float32", x, rows):
        assert outputs["best"].tolist() == [39, -1, 39, 39]
        assert outputs["after"].tolist() == [8, -1, -1, -1]


SPOILED = {
    "no finite number": (slice(None), -np.inf),
    "a NaN": (0, np.nan),
    "a NaN at the end": (2599, np.nan),
    "only NaNs": (slice(None), np.nan),
    "infinity": (1300, np.inf),
}


@in_turn(SPOILED)
def test_a_row_that_is_not_finite_ends_all_rows(dtype, case, rng):
    x = rng.integers(-9, 3, (20, 2600)).astype(numpy_dtype(dtype))
    columns, value = SPOILED[case]
    best = x.argmax(axis=1)
    x[13, columns] = value
    best[13] = NOT_FINITE
    for outputs in found_in(dtype, x, rows_of(20)):
        assert outputs["best"].tolist() == best.tolist()
        assert outputs["after"].tolist() == [-1] * 20


def test_a_row_without_a_step_may_have_any_numbers():
    x = np.tile(np.arange(64, dtype=np.float32), (9, 1))
    x[3] = np.nan
    rows = rows_of(9)
    rows["position"][3] = -1
    for outputs in found_in("float32", x, rows):
        assert outputs["best"].tolist() == [63] * 3 + [NO_TOKEN] + [63] * 5
        assert outputs["after"].tolist() == [8] * 3 + [-1] + [8] * 5


def rows_of(rows):
    """Rows at position 7 of more, with 40 stop tokens that are none."""
    numbers = {"position": 7, "end": 9}
    arrays = {n: np.full(rows, number, np.int32) for n, number in numbers.items()}
    return arrays | {"stop": np.full((rows, 40), -1, np.int32)}


def found_in(dtype, x, rows, padding=0):
    """The outputs of both backends. padding: columns at the end of a row."""
    num_rows, columns = x.shape
    dims = {"rows": num_rows, "columns": columns, "stops": rows["stop"].shape[1]}
    dims["count"] = columns - padding
    return both(program(dtype), rows | {"x": x}, dims)


def test_of_equal_numbers_on_two_ranks_the_first_one_is_found(rng):
    x = rng.integers(-9, 3, (20, 3 * WIDTH)).astype(np.float32)
    columns = x.argmax(axis=1)
    for outputs in ranks_of(x):
        assert outputs["best"].tolist() == columns.tolist()
        assert outputs["after"].tolist() == [8] * 20


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_all_ranks_find_a_row_that_is_not_finite_on_one(value, rng):
    x = rng.integers(-9, 3, (20, 3 * WIDTH)).astype(np.float32)
    columns = x.argmax(axis=1)
    x[7, WIDTH + 5] = value
    columns[7] = NOT_FINITE
    for outputs in ranks_of(x):
        assert outputs["best"].tolist() == columns.tolist()
        assert outputs["after"].tolist() == [-1] * 20


def ranks_of(x):
    """The outputs of three ranks, of both backends."""
    parts = [rows_of(len(x)) | {"x": part.copy()} for part in np.split(x, 3, axis=1)]
    dims = {"rows": len(x), "columns": WIDTH, "stops": 40, "count": WIDTH}
    for outputs in both_on_ranks(program(ranks=3), parts, dims):
        yield from outputs


@pytest.mark.parametrize(
    "dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.exhaustive)]
)
def test_the_cuda_bodies_compile_without_spills(dtype):
    check_compiled(next_tokens(1, width=WIDTH, dtype=dtype))
