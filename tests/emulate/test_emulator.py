"""The emulator as an object: its outputs, and the functions that bodies may call."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from etc_dist.emulate import Emulator, library
from etc_dist.errors import ArgumentError
from etc_dist.functions.push_rows import push_rows
from etc_dist.ir import DeviceFunction, Expr, Graph, graph_function, select
from etc_dist.runtime.cpu import simulate
from tests.emulate.programs import gathered_rows, one_task

V = 2.6
SET_ALL = """#pragma once
#include "worker/task.cuh"
namespace etc {
template <class Task>
struct set_all {
  ETC_DEVICE static void run(const Task& task) {
    const auto y = task.template operand<0>();
    if (task.thread < y.size[0]) *y.at(task.thread) = VALUE;
  }
};
}  // namespace etc
"""


@graph_function
def set_all_graph(g: Graph, *, source: Path) -> None:
    n = g.dims("n")
    y = g.output("y", (n,), "int32")
    set_all = DeviceFunction("set_all", print, source, "tensor", 0, 1)
    g.call(set_all, g.grid(i=1), writes=[y[:]])


@graph_function
def copies(g: Graph) -> None:
    n = g.dims("n")
    x, y = g.input("x", (n,), "float32"), g.output("y", (n,), "float32")
    g.call(push_rows(), g.grid(i=1), reads=[x[:]], writes=[y[:]])


def test_bodies_call_functions_of_cuda_math(folder):
    graph = one_task(1, body="math_functions", dtype="float32", lane="tensor")
    exp, log = math.exp(V), math.log(V)
    expected = [V**-0.5, exp, 2**V, exp, log, math.log2(V), log, math.tanh(V)]
    expected += [V**0.5, math.erf(V), V, V, 1, 1 / V, V, 1, exp, V**0.5, V**-0.5, 1 / V]
    expected += [2, 3, 2, V, 31, ml_dtypes.bfloat16(V), np.float16(V), V, 2, V * V]
    expected += [math.sin(V), 2]
    x = np.full(4, V, np.float32)
    [found] = Emulator(graph, folder=folder).run([{"x": x}], {"n": 4, "m": 32})
    np.testing.assert_allclose(found["y"], np.array(expected, np.float32), rtol=1e-5)


def test_bodies_call_functions_of_a_warp(folder):
    graph = one_task(1, body="warp_functions", dtype="int32", lane="transfer")
    x = np.arange(32, dtype=np.int32)
    [found] = Emulator(graph, folder=folder).run([{"x": x}], {"n": 32, "m": 32})
    of_pair = (x ^ 1) + x // 2 * 2
    np.testing.assert_array_equal(found["y"], x.sum() + of_pair)


def test_same_seed_repeats_a_run_and_inputs_stay_as_they_are(folder):
    graph = one_task(1, body="math_functions", dtype="float32", lane="tensor")
    emulator = Emulator(graph, folder=folder, workers=1)
    inputs, dims = [{"x": np.ones(4, np.float32)}], {"n": 4, "m": 32}
    found, again = (emulator.run(inputs, dims, seed=3, runs=2) for _ in range(2))
    assert found[0]["y"].tobytes() == again[0]["y"].tobytes()
    assert inputs[0]["x"].tolist() == [1] * 4


def test_elements_that_no_task_writes_are_nan(folder):
    graph = one_task(1, body="write_first", dtype="float32", lane="tensor")
    x = np.ones(4, np.float32)
    [found] = Emulator(graph, folder=folder).run([{"x": x}], {"n": 4, "m": 4})
    assert found["y"][0] == 1 and np.isnan(found["y"][1:]).all()


def test_dims_are_those_of_the_arrays_unless_given(folder):
    graph = one_task(1, body="write_first", dtype="float32", lane="tensor")
    inputs = [{"x": np.ones(4, np.float32)}]
    with pytest.raises(ArgumentError, match="an axis that is just m"):
        Emulator(graph, folder=folder).run(inputs)
    copied = Emulator(copies(1), folder=folder).run(inputs)
    assert copied[0]["y"].tolist() == [1] * 4


def test_changed_body_is_compiled_again(folder, tmp_path):
    path = tmp_path / "set_all.cuh"
    found = []
    for value in (1, 2):
        path.write_text(SET_ALL.replace("VALUE", str(value)))
        emulator = Emulator(set_all_graph(1, source=path), folder=folder)
        found += emulator.run([{}], {"n": 4})
    assert [int(outputs["y"][0]) for outputs in found] == [1, 2]


def test_kept_library_of_other_flags_is_not_loaded(tmp_path, monkeypatch):
    path = tmp_path / "set_all.cuh"
    path.write_text(SET_ALL.replace("VALUE", "3"))
    for flags in (library.PROGRAM_FLAGS, (*library.PROGRAM_FLAGS, "-DUNUSED")):
        monkeypatch.setattr(library, "PROGRAM_FLAGS", flags)
        Emulator(set_all_graph(1, source=path), folder=tmp_path)
    assert len(list(tmp_path.glob("*.so"))) == 2


def test_kept_library_that_was_cut_off_is_built_again(tmp_path):
    path = tmp_path / "set_all.cuh"
    path.write_text(SET_ALL.replace("VALUE", "4"))
    Emulator(set_all_graph(1, source=path), folder=tmp_path)
    [kept] = tmp_path.glob("*.so")
    whole = kept.read_bytes()
    kept.unlink()  # what is loaded stays as it is
    kept.write_bytes(whole[: len(whole) // 2])
    emulator = Emulator(set_all_graph(1, source=path), folder=tmp_path)
    assert int(emulator.run([{}], {"n": 4})[0]["y"][0]) == 4


def test_threads_run_one_after_another(folder):
    graph = one_task(1, body="math_functions", dtype="float32", lane="tensor")
    emulators = [Emulator(graph, folder=folder) for _ in range(2)]  # of one library
    inputs, dims = [{"x": np.full(4, V, np.float32)}], {"n": 4, "m": 32}
    expected = emulators[0].run(inputs, dims)[0]["y"].tobytes()
    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(emulators[i % 2].run, inputs, dims) for i in range(16)]
        assert {done.result()[0]["y"].tobytes() for done in waiting} == {expected}


def test_what_select_does_not_choose_may_be_out_of_range(folder):
    def row(at: Expr, m: Expr) -> Expr:
        return select(at < 1, 0, select(at <= m, m // at - 1, at * 65536 % m))

    emulator = Emulator(gathered_rows(1, row=row), folder=folder)
    at, x = np.array([0, 3, 12, 13], np.int32), np.arange(48, dtype=np.float32)
    inputs = [{"x": x.reshape(12, 4), "at": at}]
    expected = inputs[0]["x"][[0, 3, 0, 13 * 65536 % 12]]
    on_cpu = simulate(emulator.plan, inputs, {"n": 4, "m": 12}).outputs
    for outputs in (emulator.run(inputs), on_cpu):
        np.testing.assert_array_equal(outputs[0]["y"], expected)
