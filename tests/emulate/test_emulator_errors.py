"""Refused arguments of the emulator, and faults that it finds in bodies."""

from __future__ import annotations

import os
import signal
from functools import partial

import numpy as np
import pytest

from etc_dist.emulate import Emulator, emulator, shared_library
from etc_dist.errors import ArgumentError, BuildError, EmulationError, WaitTimeoutError
from etc_dist.functions.tile_shape import TileShape
from etc_dist.layers.mlp_tiles import mlp_tiles_graph
from etc_dist.ops.tile_model import Tiling
from etc_dist.runtime.cpu import simulate
from tests.emulate.cases import mlp
from tests.emulate.programs import chosen_task, gathered_rows, one_task
from tests.emulate.test_given_counts import first_rows
from tests.graphs.running_sums import inputs, running_sums
from tests.layers.programs import without
from tests.refusals import refused

X = np.arange(256, dtype=np.int32)


def run(body, dims=None, **options):
    graph = one_task(body, "int32")
    program = Emulator(graph, **options)
    program.run([{"x": X}], dims or {"n": 256, "m": 4}, seed=1)


FAULTS = {
    "too_far": "an access out of bounds of all arrays: far from all of them",
    "race": "a data race at y[0] of rank 0: written for thread ",
    "deadlock": "all threads wait for one another",
    "write_input": "an input is written: x[",
    "divide_by_zero": "an integer division by zero",
    "overflow_stack": "a stack overflow",
    "trap": "an instruction that traps",
    "loop_that_polls": "a thread that polls memory in a loop without ptx::nanosleep",
    "loop_in_registers": "a loop without end, which accesses no memory",
    "loop_too_far": "an access out of bounds of all arrays",
    "loop_writes_input": "an input is written",
    "vector_race": "a data race at y[0] of rank 0: written for thread ",
    "vector_too_far": "an access out of bounds of all arrays",
    "vector_writes_input": "an input is written",
    "write_stacks": "an access out of bounds of all arrays",
    "vector_unaligned": "an access that is not aligned",
    "wgmma_too_far": "an access out of bounds of shared memory",
}
"""Bodies of cuda_functions.cuh."""


@pytest.mark.parametrize("body", FAULTS)
def test_fault_of_a_body_is_an_error_in_four_parts(body):
    program = Emulator(chosen_task([*FAULTS]))
    dims = {"n": 256, "m": 4, "chosen": list(FAULTS).index(body)}
    with pytest.raises(EmulationError) as caught:
        program.run([{"x": X}], dims, seed=1)
    error = caught.value
    assert FAULTS[body] in error.got
    assert "calls" in error.what and "seed 1" in error.what
    assert "rank 0, worker" in error.where and len(error.fix) > 20
    assert error.where.endswith(f", in task {body}[0]")


def test_memory_of_an_interrupted_run_is_not_used_again(monkeypatch):
    program = Emulator(gathered_rows())
    x = np.arange(48, dtype=np.float32).reshape(12, 4)

    def run(last):
        at = np.array([1, 0, 0, last], np.int32)
        return program.run([{"x": x, "at": at}], {"n": 4, "m": 12})[0]["y"]

    assert (run(2) == x[[1, 0, 0, 2]]).all()
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(emulator, "decode", interrupt)
        run(40000)
    assert (run(2) == x[[1, 0, 0, 2]]).all()


def interrupt(*arguments):
    raise KeyboardInterrupt


def test_faults_leave_the_memory_of_the_process_intact():
    program = Emulator(chosen_task([*FAULTS]))
    dims = {"n": 256, "m": 4, "chosen": list(FAULTS).index("wgmma_too_far")}
    for seed in range(6):
        with pytest.raises(EmulationError):
            program.run([{"x": X}], dims, seed=seed)


def test_a_child_of_a_process_in_a_run_can_run():
    program = Emulator(chosen_task([*FAULTS]))
    with emulator._running:
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            with pytest.raises(EmulationError):
                program.run([{"x": X}], {"n": 256, "m": 4, "chosen": 0}, seed=1)
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def test_what_follows_a_wait_that_was_given_up_is_not_reported():
    graph = mlp_tiles_graph(1, shapes=[TileShape(128, 256)])
    inputs, _, dims = mlp(1, 40, 640, 640, Tiling(0, 256), Tiling(0, 256))
    program = Emulator(without(graph, "activated", "notifies"))
    with pytest.raises(WaitTimeoutError, match="down_tile_matmul.* waits for activate"):
        program.run(inputs, dims)


def test_a_race_names_the_element_of_a_local_tensor():
    graph = without(first_rows(waits=True), "copied", "waits")
    program = Emulator(graph)
    x = np.arange(80, dtype=np.int32)
    arrays = {"given": np.array([5], np.int32), "x": x, "y": x}
    with pytest.raises(EmulationError, match=r"data race at half\[\d+\] of rank 0: "):
        for seed in range(4):
            program.run([arrays], {"rows": 5}, seed=seed)


@pytest.mark.parametrize("schedule", ["static", "dynamic"])
def test_an_unmet_wait_is_named_after_tasks_that_do_not_wait(schedule):
    graph = without(running_sums(1, kind="dims"), "summed", "notifies")
    program = Emulator(graph, schedule=schedule)
    with pytest.raises(WaitTimeoutError, match=r"add_before\[\d\] waits for summed\["):
        program.run([inputs(4)])


def test_body_that_does_not_compile_shows_the_compiler_output():
    with pytest.raises(BuildError, match="no_such_function"):
        run("unknown_function")


def test_missing_compiler_is_reported_with_its_install_command(monkeypatch):
    monkeypatch.setattr(shared_library, "find_spec", lambda name: None)
    with pytest.raises(BuildError, match=r"pip install 'ziglang>=0.17'"):
        run("race")


def floats(inputs, n, **options):
    graph = one_task("math_functions", "float32")
    Emulator(graph).run(inputs, {"n": n, "m": 32}, **options)


ONE = [{"x": np.ones(4, np.float32)}]
REFUSALS = {
    "schedule": (
        lambda: run("race", schedule="best"),
        "'static' or 'dynamic' or 'auto'",
    ),
    "workers": (lambda: run("race", workers=0), "workers: an integer from 1 to 256"),
    "many workers": (lambda: run("race", workers=10_000), "an integer from 1 to 256"),
    "graph": (lambda: Emulator("graph"), "expects a GraphFunction"),
    "missing dim": (lambda: run("race", {"n": 256}), "give every dim"),
    "shape": (lambda: run("race", {"n": 128, "m": 4}), "x [128]"),
    "missing array": (
        lambda: Emulator(gathered_rows()).run([{}]),
        "none for at, x",
    ),
    "ranks": (lambda: floats([], 4), "wanted: 1 mappings got: 0"),
    "list": (lambda: floats([{"x": [0.0]}], 4), "x expects a"),
    "rows": (
        lambda: floats([{"x": np.ones(3, np.float32)}], 3),
        "rows of a multiple of 16 bytes",
    ),
    "seed below 0": (lambda: floats(ONE, 4, seed=-1), "seed: an integer from 0 to"),
    "large seed": (lambda: floats(ONE, 4, seed=2**64 - 1), "an integer from 0 to"),
    "seed": (lambda: floats(ONE, 4, seed="a"), "seed expects an int"),
    "runs": (lambda: floats(ONE, 4, runs=True), "runs expects an int"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_arguments_that_do_not_fit_are_refused(name):
    refused(*REFUSALS[name], (ArgumentError, TypeError))


@pytest.mark.parametrize(
    ("row", "of_one"),
    [
        ("at * 65537 % m", 5),
        ("at * 65536 // 65536", 1),
        ("minimum(at * 65536, m - 1)", 11),
        ("maximum(at * 65536 - m, 0) % m", 4),
    ],
    ids=["%", "//", "min", "max"],
)
def test_results_on_loads_have_32_bits_as_on_gpus(row, of_one):
    emulator = Emulator(gathered_rows(row))
    x = np.arange(48, dtype=np.float32).reshape(12, 4)
    fits, exceeds = (
        [{"x": x, "at": np.array([1, 0, 0, last], np.int32)}] for last in (0, 40000)
    )
    on_cpu = partial(simulate, emulator.plan, dims={"n": 4, "m": 12})
    for run_on in (emulator.run, lambda inputs: on_cpu(inputs).outputs):
        assert (run_on(fits)[0]["y"] == x[[of_one, 0, 0, 0]]).all()
        with pytest.raises(ArgumentError, match=r"32.bit.*, in x\[.*6553"):
            run_on(exceeds)


def test_loaded_divisor_of_zero_is_out_of_range_as_on_gpus():
    emulator = Emulator(gathered_rows("m // at"))
    at = np.array([12, 12, 0, 12], np.int32)
    with pytest.raises(ArgumentError, match=r"in x\[m // at\[i\], :\]"):
        emulator.run([{"x": np.ones((12, 4), np.float32), "at": at}])
