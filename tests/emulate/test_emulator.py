"""The emulator as an object: its outputs, and the functions that bodies may call."""

from __future__ import annotations

import math
import re
import shutil
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest

from etc_dist.codegen import generate
from etc_dist.emulate import Emulator, shared_library
from etc_dist.errors import ArgumentError
from etc_dist.functions.push_rows import push_rows
from etc_dist.ir import DeviceFunction
from etc_dist.runtime.build import kernels_folder
from etc_dist.runtime.cpu import simulate
from etc_dist.runtime.includes import headers
from etc_dist.schedule import schedule_static
from tests.emulate.programs import gathered_rows, one_task
from tests.graphs.calls import whole

V = 2.6
SET_ALL = """#pragma once
#include "worker/task.cuh"
namespace etc {
template <class Task>
struct set_all {
  ETC_DEVICE static void run(const Task& task) {
    const auto y = task.template operand<0>();
    if (task.thread < y.size[0]) *y.at(task.thread) = 1;
  }
};
}  // namespace etc
"""


def test_bodies_call_functions_of_cuda_math():
    graph = one_task("math_functions", "float32")
    exp, log = math.exp(V), math.log(V)
    expected = [V**-0.5, exp, 2**V, exp, log, math.log2(V), log, math.tanh(V)]
    expected += [V**0.5, math.erf(V), V, V, 1, 1 / V, V, 1, exp, V**0.5, V**-0.5, 1 / V]
    expected += [2, 3, 2, V, 31, ml_dtypes.bfloat16(V), np.float16(V), V, 2, V * V]
    expected += [math.sin(V), 2]
    x = np.full(4, V, np.float32)
    [outputs] = Emulator(graph).run([{"x": x}], {"n": 4, "m": 32})
    np.testing.assert_allclose(outputs["y"], np.array(expected, np.float32), rtol=1e-5)


def test_bodies_call_functions_of_a_warp():
    graph = one_task("warp_functions", "int32", "transfer")
    x = np.arange(32, dtype=np.int32)
    [outputs] = Emulator(graph).run([{"x": x}], {"n": 32, "m": 32})
    of_pair = (x ^ 1) + x // 2 * 2
    np.testing.assert_array_equal(outputs["y"], x.sum() + of_pair)


def test_same_seed_repeats_a_run_and_inputs_stay_as_they_are():
    graph = one_task("math_functions", "float32")
    emulator = Emulator(graph, workers=1)
    inputs, dims = [{"x": np.ones(4, np.float32)}], {"n": 4, "m": 32}
    outputs, again = (emulator.run(inputs, dims, seed=3, runs=2) for _ in range(2))
    assert outputs[0]["y"].tobytes() == again[0]["y"].tobytes()
    assert inputs[0]["x"].tolist() == [1] * 4


def test_elements_that_no_task_writes_are_nan():
    graph = one_task("write_first", "float32")
    x = np.ones(4, np.float32)
    [outputs] = Emulator(graph).run([{"x": x}], {"n": 4, "m": 4})
    assert outputs["y"][0] == 1 and np.isnan(outputs["y"][1:]).all()


def test_dims_are_those_of_the_arrays_unless_given():
    graph = one_task("write_first", "float32")
    inputs = [{"x": np.ones(4, np.float32)}]
    with pytest.raises(ArgumentError, match="an axis that is just m"):
        Emulator(graph).run(inputs)
    copied = Emulator(whole(1, function=push_rows())).run(inputs)
    assert copied[0]["y"].tolist() == [1] * 4


@pytest.fixture
def compilations(monkeypatch, tmp_path):
    """The calls of the compiler during the test, which begins with an empty cache and
    without loaded libraries."""
    calls = []
    run = shared_library._run
    monkeypatch.setenv("ETC_DIST_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(shared_library, "_libraries", {})
    monkeypatch.setattr(shared_library, "_common", {})
    monkeypatch.setattr(shared_library, "_run", lambda *a: [calls.append(a), run(*a)])
    return calls


def test_another_process_loads_the_kept_library(compilations, monkeypatch):
    for _ in range(2):
        emulator = Emulator(whole(1, function=push_rows()))
        [outputs] = emulator.run([{"x": np.ones(4, np.float32)}])
        assert outputs["y"].tolist() == [1] * 4
        shared_library._libraries.clear()
    assert len(compilations) == 3  # of prelude.h, run.cpp, and the program


def test_what_programs_have_in_common_is_compiled_once(compilations):
    for dtype in ("float32", "int32"):
        Emulator(whole(1, function=push_rows(), dtype=dtype))
    assert len(compilations) == 4


@pytest.mark.parametrize(
    "changed_part",
    ["set_all.cuh", "kernels/common/types.cuh", "include/ptx/warp.cuh", "flags"],
)
def test_a_library_has_another_key_after_a_change(changed_part, monkeypatch, tmp_path):
    shutil.copytree(kernels_folder(), tmp_path / "kernels")
    shutil.copytree(shared_library.INCLUDE, tmp_path / "include")
    monkeypatch.setattr(shared_library, "INCLUDE", tmp_path / "include")
    body = tmp_path / "set_all.cuh"
    body.write_text(SET_ALL)
    set_all = DeviceFunction("set_all", print, body, "tensor", 0, 1)
    source = generate(schedule_static(whole(1, function=set_all, dtype="int32")))
    before = shared_library._key(source, tmp_path / "kernels")
    if changed_part == "flags":
        monkeypatch.setattr(shared_library, "PROGRAM_FLAGS", shared_library.FLAGS)
    else:
        with (tmp_path / changed_part).open("a") as file:
            file.write("const int unused = 0;\n")
    assert shared_library._key(source, tmp_path / "kernels") != before


def test_headers_that_the_emulator_includes_are_part_of_each_program():
    names = re.compile(r'^#include "(\w+/.*)"$', re.MULTILINE)
    own_headers = [*shared_library.INCLUDE.rglob("*.*h")]
    texts = [path.read_text() for path in own_headers]
    header_names = {name for text in texts for name in names.findall(text)}
    header_names -= {str(p.relative_to(shared_library.INCLUDE)) for p in own_headers}
    source = generate(schedule_static(whole(1, function=push_rows())))
    assert header_names and header_names <= headers(source, kernels_folder()).keys()


def test_threads_run_one_after_another():
    graph = one_task("math_functions", "float32")
    emulators = [Emulator(graph) for _ in range(2)]  # of one library
    inputs, dims = [{"x": np.full(4, V, np.float32)}], {"n": 4, "m": 32}
    expected = emulators[0].run(inputs, dims)[0]["y"].tobytes()
    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(emulators[i % 2].run, inputs, dims) for i in range(16)]
        assert {future.result()[0]["y"].tobytes() for future in waiting} == {expected}


def test_what_select_does_not_choose_may_be_out_of_range():
    row = "select(at < 1, 0, select(at <= m, m // at - 1, at * 65536 % m))"
    emulator = Emulator(gathered_rows(row))
    at, x = np.array([0, 3, 12, 13], np.int32), np.arange(48, dtype=np.float32)
    inputs = [{"x": x.reshape(12, 4), "at": at}]
    expected = inputs[0]["x"][[0, 3, 0, 13 * 65536 % 12]]
    on_cpu = simulate(emulator.plan, inputs, {"n": 4, "m": 12}).outputs
    for outputs in (emulator.run(inputs), on_cpu):
        np.testing.assert_array_equal(outputs[0]["y"], expected)
