"""Errors for rows that are out of range."""

from __future__ import annotations

import numpy as np
import pytest

from etc_dist.emulate import Emulator
from etc_dist.errors import ArgumentError
from etc_dist.functions.append_kv import PagedCache
from etc_dist.functions.check_rows import add_row_checks
from etc_dist.ir import Graph, graph_function
from etc_dist.runtime.cpu import simulate
from etc_dist.schedule import schedule_static
from tests.functions.compiled import check_compiled
from tests.functions.paged import draw_step

SIZE, VOCABULARY = 16, 5


@graph_function
def checked(g: Graph) -> None:
    rows, requests, most_pages = g.dims("rows requests most_pages")
    all_pages, positions = g.dims("all_pages positions")
    cos_sin = g.input("cos_sin", (positions, 64), "float32")
    names = "request", "position", "end", "ids"
    given = [g.input(name, (rows,), "int32")[:] for name in names]
    copies = [g.output(f"copied_{name}", (rows,), "int32")[:] for name in names]
    table = g.input("table", (requests, most_pages), "int32")
    cache = g.input("cache", (2, all_pages, 2, 1, SIZE, 64), "bfloat16")
    embedding = g.input("embedding", (VOCABULARY, 8), "bfloat16")
    add_row_checks(g, SIZE, cos_sin, table, cache, embedding, given, copies)


@pytest.fixture(scope="module")
def emulator() -> Emulator:
    return Emulator(checked(1))


@pytest.fixture
def given(rng):
    drawn = draw_step(rng, PagedCache(64, SIZE), 1, 1, [[0], [40, 41], [20]])
    used = {n: a for n, a in drawn.items() if n not in ("qkv", "q_gain", "k_gain")}
    embedding = np.zeros((VOCABULARY, 8), used["cache"].dtype)
    ids = np.full(4, VOCABULARY - 1, np.int32)
    return used | {"end": np.zeros(4, np.int32), "ids": ids, "embedding": embedding}


def runs(given, emulator):
    """Runs on both backends."""
    requests, most_pages = given["table"].shape
    dims = {
        "rows": len(given["request"]),
        "requests": requests,
        "most_pages": most_pages,
        "all_pages": given["cache"].shape[1],
        "positions": len(given["cos_sin"]),
    }
    return (
        lambda: simulate(schedule_static(checked(1)), [given], dims),
        lambda: emulator.run([given], dims),
    )


def test_numbers_that_no_row_uses_are_not_checked(given, emulator):
    rows = given["position"]
    given["table"][given["request"][rows == 20][0], 2] = -7
    given["request"][rows == 0], given["ids"][rows == 0] = 99, -5
    rows[rows == 0] = -1
    simulated, emulated = runs(given, emulator)
    for found in simulated().outputs[0], emulated()[0]:
        for name in ("request", "position", "end", "ids"):
            np.testing.assert_array_equal(found[f"copied_{name}"], given[name])


@pytest.mark.parametrize(
    ("name", "value", "call"),
    [
        ("request", -1, "request_exists"),
        ("request", 3, "request_exists"),
        ("position", 48, "position_exists|table_is_long_enough"),
        ("table", 10, "page_exists"),
        ("end", 49, "position_exists|table_is_long_enough"),
        ("ids", VOCABULARY, "token_exists"),
        ("ids", -1, "token_exists"),
    ],
)
def test_a_wrong_number_ends_the_run(name, value, call, given, emulator):
    before = given[name].copy()
    given[name][0] = value
    for run in runs(given, emulator):
        with pytest.raises(ArgumentError, match=call):
            run()
    given[name][...] = before
    for run in runs(given, emulator):
        run()


def test_the_cuda_bodies_compile_without_spills():
    check_compiled(checked(1))
