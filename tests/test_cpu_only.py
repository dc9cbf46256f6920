"""Warnings of what the CPU backend runs and GPUs do not."""

from __future__ import annotations

import warnings
from contextlib import nullcontext

import numpy as np
import pytest

import etc_dist
from etc_dist.errors import CpuOnlyWarning
from etc_dist.functions.add_partials import add_partials
from etc_dist.functions.push_rows import push_rows
from etc_dist.ir import Graph, ceildiv, graph_function, minimum, span, tile
from etc_dist.world import start
from tests.emulate.test_users_graphs import split_of_k
from tests.graphs.calls import whole
from tests.runtime.programs import send

ROWS = 4


@pytest.fixture
def cpu(monkeypatch):
    monkeypatch.setenv("ETC_DIST_BACKEND", "cpu")
    with start() as world:
        yield world


@graph_function
def moved(g: Graph, *, written: str) -> None:
    """y = x by blocks of rows, whose size is written in one of two ways, or in both."""
    rows, n = g.dims("rows n")
    x, y = g.input("x", (rows, n), "float32"), g.output("y", (rows, n), "float32")
    (i,) = grid = g.grid(i=ceildiv(rows, ROWS))
    left = span(i * ROWS, minimum(ROWS, rows - i * ROWS))
    names = {"tile": tile(i, ROWS), "span": left}
    to, at = (names[name] for name in written.split())
    g.call(push_rows(), grid, name="move", reads=[x[at, :]], writes=[y[to, :]])


def test_sizes_that_are_written_in_two_ways_are_warned_of(cpu):
    with pytest.warns(CpuOnlyWarning) as caught:
        program = etc_dist.compile(moved(1, written="tile span"), cpu)
    (warning,) = caught
    assert warning.filename == __file__
    text = str(warning.message)
    assert text.startswith("call move: operand 1 does not fit the tile of push_rows")
    assert "got:    [4, n], where operand 0 is [min(4, rows - i * 4), n]" in text
    assert "to do:  use a region of that shape" in text
    x = np.ones((5, 4), np.float32)
    np.testing.assert_array_equal(program.run(x=x)["y"], x)


def test_sizes_that_are_written_in_one_way_are_not_warned_of(cpu):
    program = etc_dist.compile(moved(1, written="span span"), cpu)
    x = np.ones((5, 4), np.float32)
    np.testing.assert_array_equal(program.run(x=x)["y"], x)


@graph_function
def slices_of_k(g: Graph) -> None:
    """Each call that GPUs refuse, beside one that they run."""
    n = g.dims("n")
    x, y = g.input("x", (2, 4, n), "float32"), g.output("y", (4, n), "float32")
    z = g.output("z", (4, n), "float32")
    (i,) = grid = g.grid(i=ceildiv(n, 8))
    part = span(i * 8, minimum(8, n - i * 8)), span(i * 4, minimum(4, n - i * 4))
    add = add_partials("float32")
    g.call(add, grid, name="good", reads=[x[:, :, part[0]]], writes=[y[:, part[0]]])
    narrow = g.grid(i=ceildiv(n, 4))
    g.call(add, narrow, name="bad", reads=[x[:, :, part[1]]], writes=[z[:, part[1]]])


def test_each_call_is_warned_of_alone(cpu):
    with pytest.warns(CpuOnlyWarning) as caught:
        etc_dist.compile(slices_of_k(1), cpu)
    assert [str(w.message).partition(":")[0] for w in caught] == ["call bad"]


@pytest.mark.parametrize("n", [1, 3])
def test_rows_that_gpus_cannot_copy_are_warned_of_once(n, cpu):
    program = etc_dist.compile(whole(1, function=send), cpu)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            program.run(x=np.ones(n, np.float32))
    (warning,) = caught
    assert warning.category is CpuOnlyWarning
    assert warning.filename == __file__
    text = str(warning.message)
    assert "wanted: x, y with rows of a multiple of 16 bytes" in text
    assert f"got:    x [{n}] float32 on cpu; y [{n}] float32 on cpu" in text


def test_rows_that_gpus_copy_are_not_warned_of(cpu):
    program = etc_dist.compile(whole(1, function=send), cpu)
    program.run(x=np.ones(4, np.float32))


@graph_function
def added(g: Graph) -> None:
    n = g.dims("n")
    x, y = g.input("x", (2, 4, n), "float32"), g.output("y", (4, n), "float32")
    add, one = add_partials("float32"), g.grid(one=1)
    g.call(add, one, reads=[x[:, :, :]], writes=[y[:, :]])


def test_rows_that_a_function_cannot_store_are_warned_of(cpu):
    program = etc_dist.compile(added(1), cpu)
    program.run(x=np.ones((2, 4, 16), np.float32))
    with pytest.warns(CpuOnlyWarning, match=r"x cannot be stored[^$]*n = 12 elements"):
        program.run(x=np.ones((2, 4, 12), np.float32))


def test_empty_slices_are_warned_of(cpu):
    program = etc_dist.compile(split_of_k(1, dtype="float16", parts=2), cpu)
    for k, is_warned in ((512, False), (256, True)):
        given = {"x": np.ones((8, k), np.float16), "w": np.ones((16, k), np.float16)}
        words = "a region of .* is empty"
        with pytest.warns(CpuOnlyWarning, match=words) if is_warned else nullcontext():
            y = program.run(**given)["y"]
        assert (y == k).all()
