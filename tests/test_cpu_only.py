"""Warnings of what the CPU backend runs and GPUs do not."""

from __future__ import annotations

import warnings
from contextlib import nullcontext

import numpy as np
import pytest
from ml_dtypes import bfloat16

import etc_dist
from etc_dist.errors import CpuOnlyWarning
from etc_dist.functions.add_partials import add_partials
from etc_dist.functions.push_rows import push_rows
from etc_dist.ir import GraphFunction
from etc_dist.world import start
from tests.graphs.calls import Task, calls, one_call, whole
from tests.runtime.programs import send
from tests.runtime.test_region_checks_errors import split_of_k


@pytest.fixture
def cpu(monkeypatch):
    monkeypatch.setenv("ETC_DIST_BACKEND", "cpu")
    with start() as world:
        yield world


def moved(to: str, at: str) -> GraphFunction:
    """y = x by blocks of rows, whose size is written in one of two ways, or in both."""
    reads, writes = [f"x rows[{at}] n float32"], [f"y rows[{to}] n float32"]
    return one_call(1, push_rows(), reads, writes, grid="i: ceildiv(rows, 4)")


TILE, SPAN = "tile(i, 4)", "span(i * 4, minimum(4, rows - i * 4))"


def test_sizes_that_are_written_in_two_ways_are_warned_of(cpu):
    with pytest.warns(CpuOnlyWarning) as caught:
        program = etc_dist.compile(moved(TILE, SPAN), cpu)
    (warning,) = caught
    assert warning.filename == __file__
    text = str(warning.message)
    assert text.startswith(
        "call push_rows: operand 1 does not fit the tile of push_rows"
    )
    assert "got:    [4, n], where operand 0 is [min(4, rows - i * 4), n]" in text
    assert "to do:  use a region of that shape" in text
    x = np.ones((5, 4), np.float32)
    np.testing.assert_array_equal(program.run(x=x)["y"], x)


def test_sizes_that_are_written_in_one_way_are_not_warned_of(cpu):
    program = etc_dist.compile(moved(SPAN, SPAN), cpu)
    x = np.ones((5, 4), np.float32)
    np.testing.assert_array_equal(program.run(x=x)["y"], x)


def test_each_call_is_warned_of_alone(cpu):
    """Of each call that GPUs refuse, beside one that they run."""
    tasks, add = [], add_partials("float32")
    for name, y, size in (("good", "y", 8), ("bad", "z", 4)):
        at = f"4 n[span(i * {size}, minimum({size}, n - i * {size}))] float32"
        reads, writes, grid = [f"x 2 {at}"], [f"{y} {at}"], f"i: ceildiv(n, {size})"
        tasks.append(Task(add, reads, writes, name=name, grid=grid))
    with pytest.warns(CpuOnlyWarning) as caught:
        etc_dist.compile(calls(1, tasks=tasks), cpu)
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


def test_rows_that_a_function_cannot_store_are_warned_of(cpu):
    graph = one_call(1, add_partials("float32"), ["x 2 4 n float32"], ["y 4 n float32"])
    program = etc_dist.compile(graph, cpu)
    program.run(x=np.ones((2, 4, 16), np.float32))
    with pytest.warns(CpuOnlyWarning, match=r"x cannot be stored[^$]*n = 12 elements"):
        program.run(x=np.ones((2, 4, 12), np.float32))


def test_empty_slices_are_warned_of(cpu):
    program = etc_dist.compile(split_of_k("fp32"), cpu)
    for k, is_warned in ((384, False), (256, True)):
        x, w = (np.ones((rows, k), bfloat16) for rows in (64, 128))
        words = "a region of .* is empty"
        with pytest.warns(CpuOnlyWarning, match=words) if is_warned else nullcontext():
            y = program.run(x=x, w=w)["y"]
        assert (y.sum(axis=0) == k).all()
