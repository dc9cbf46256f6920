"""Loops: layers and steps run turn by turn, with the results of NumPy."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from etc_dist.codegen.layout import TRACE_RECORD, TRACE_WARPS
from etc_dist.emulate import Emulator
from etc_dist.errors import ArgumentError, DeadlockError, WaitTimeoutError
from etc_dist.ir import Expr, GraphFunction, device_function, equal, select
from etc_dist.runtime.cpu import simulate
from etc_dist.runtime.trace import Trace
from etc_dist.schedule import SCHEDULES, schedule_static
from tests.graphs.calls import Task, calls, one_call
from tests.graphs.looped import (
    count_up,
    dims_of,
    double_up,
    expected,
    inputs,
    residual_layers,
    stepped,
    steps_of_layers,
)
from tests.ops.arrays import Arrays

BOTH = pytest.mark.parametrize("schedule", ["static", "dynamic"])
LAYERS = 4


def check(results, references):
    for outputs, arrays in zip(results, references, strict=True):
        for name, array in arrays.items():
            np.testing.assert_allclose(outputs[name], array, rtol=1e-4, atol=1e-5)


@pytest.mark.mpi
@BOTH
def test_layers_run_on_all_ranks(schedule, world, make_program):
    program = make_program(residual_layers(world.size), schedule=schedule)
    backend = Arrays(world.backend)
    for layers in (LAYERS, 1, 7):
        operands = inputs(layers, world.size)
        put = {n: backend.put(a.copy()) for n, a in operands[world.rank].items()}
        y = program.run(**put)["y"]
        program.synchronize()
        results = {"y": backend.get(y), "kept": backend.get(put["kept"])}
        check([results], [expected(operands)[world.rank]])


@BOTH
@pytest.mark.parametrize("world_size", [1, 2])
def test_layers_run_in_any_order_of_workers(world_size, schedule, seed):
    plan = SCHEDULES[schedule](residual_layers(world_size))
    arrays, dims = inputs(LAYERS, world_size), dims_of(LAYERS, world_size)
    for workers in (1, 3):
        run = simulate(plan, arrays, dims, seed=seed, workers=workers)
        check(run.outputs, expected(arrays))


@pytest.mark.parametrize(
    ("world_size", "schedule"),
    [
        (1, "dynamic"),
        (2, "static"),
        pytest.param(1, "static", marks=pytest.mark.exhaustive),
        pytest.param(2, "dynamic", marks=pytest.mark.exhaustive),
    ],
)
def test_the_kernels_run_layers(world_size, schedule):
    emulator = Emulator(residual_layers(world_size), schedule=schedule, workers=3)
    for layers in (LAYERS, 1):
        arrays = inputs(layers, world_size)
        for seed in range(2):
            check(emulator.run(arrays, seed=seed), expected(arrays))


@BOTH
def test_loops_inside_of_loops(schedule):
    emulator = Emulator(steps_of_layers(1), schedule=schedule, workers=2)
    x = np.arange(4, dtype=np.float32)
    for steps, layers in ((2, 3), (3, 1), (1, 2)):
        arrays = [{"x": x, "sizes": np.zeros((steps, layers, 4), np.float32)}]
        dims = {"steps": steps, "layers": layers}
        references = [{"y": stepped(x, steps, layers)}]
        check(emulator.run(arrays), references)
        check(simulate(emulator.plan, arrays, dims).outputs, references)


def loop_first() -> GraphFunction:
    """y = x, doubled n - 1 times in a loop that is the first item of its lane."""
    parts = """
        input x [n, 1, 4] float32
        output y [n, 1, 4] float32
        local last [1, 1, 4] float32
        events sent [n] expects 1
    """
    first, end = {"notifies": ["sent[0]"]}, {"waits": ["sent[0]"], "name": "end"}
    tasks = [
        Task(count_up, ["x[0, 0, :]"], ["y[0, 0, :]"], **first),
        Task(double_up, ["x[turn, 0, :]"], ["y[turn + 1, 0, :]"], loop="turn: n - 1"),
        Task(double_up, ["y[0, 0, :]"], ["last[0, 0, :]"], **end),
    ]
    return calls(1, tasks=tasks, dims="n", parts=parts)


def test_a_loop_may_have_no_turns():
    emulator = Emulator(loop_first(), workers=3)
    for n, seed in itertools.product((1, 2, 4), range(4)):
        x = np.arange(4 * n, dtype=np.float32).reshape(n, 1, 4)
        rows = np.concatenate([x[:1] + 1, 2 * x[:-1]])
        [outputs] = emulator.run([{"x": x}], seed=seed)
        np.testing.assert_array_equal(outputs["y"], rows)


# ------------------------------------------------------------- errors and traces


def late(layer: Expr) -> Expr:
    """Layer 2 waits for the layer after it."""
    return select(equal(layer, 2), layer + 1, layer)


@BOTH
def test_a_wait_that_is_not_met_names_the_turn(schedule):
    graph, arrays, dims = residual_layers(1, wait=late), inputs(4, 1), dims_of(4, 1)
    unmet = r"add_layer\[layer=2, 0\] waits for ready\[3\]: have 0, want 6"
    with pytest.raises(DeadlockError, match=unmet):
        simulate(SCHEDULES[schedule](graph), arrays, dims, workers=1)
    with pytest.raises(WaitTimeoutError, match=unmet):
        Emulator(graph, schedule=schedule, workers=1).run(arrays)


def test_a_loaded_row_out_of_range_names_the_turn():
    """In each layer, the row at[layer] of x is doubled."""
    parts = "input at [n] int32"
    reads, writes = (
        ["x n[at.load(layer)] 1[0] 4 float32"],
        ["y n[layer] 1[0] 4 float32"],
    )
    doubled = {"loop": "layer: n", "dims": "n", "parts": parts}
    emulator = Emulator(one_call(1, double_up, reads, writes, **doubled), workers=2)
    at, x = np.array([0, 3, 1, 0], np.int32), np.arange(16, dtype=np.float32)
    arrays = [{"at": at, "x": x.reshape(4, 1, 4)}]
    y = emulator.run(arrays)[0]["y"]
    np.testing.assert_array_equal(y, 2 * arrays[0]["x"][at])
    at[2] = 9
    for run in (emulator.run, lambda arrays: simulate(emulator.plan, arrays, {"n": 4})):
        with pytest.raises(ArgumentError, match=r"double_up\[layer=2, 0\]"):
            run(arrays)


@BOTH
def test_traces_name_the_turn(schedule):
    plan, dims = SCHEDULES[schedule](residual_layers(1)), dims_of(4, 1)
    run = simulate(plan, inputs(4, 1), dims)
    labels = {record.label for record in run.tasks}
    assert {"first[0]", "add_layer[layer=3, 1]", "send[layer=0, 0, 2, 1]"} <= labels
    records = np.zeros((1, TRACE_WARPS, 3), TRACE_RECORD)
    number = [call.name for call in plan.graph.calls].index("add_layer")
    records[0, 0, 0]["begin"] = 1
    records[0, 0, 1] = (10, 20, 0, number, 2 * 2 + 1, 0)
    trace = Trace.from_gpu(plan, dims, 0, records)
    assert [record.label for record in trace.records] == ["add_layer[layer=2, 1]"]


@device_function(source="", reads=1, writes=1)
def times_layer(x, y, *, layer, n):
    y[...] = x * (layer + 10 * n)


def test_a_body_takes_the_turn_by_keyword():
    reads, writes = ["x 4 float32"], ["y n[layer] 4 float32"]
    graph = one_call(1, times_layer, reads, writes, loop="layer: n")
    x = np.arange(4, dtype=np.float32)
    outputs = simulate(schedule_static(graph), [{"x": x}], {"n": 3}).outputs[0]
    np.testing.assert_array_equal(outputs["y"], np.outer([30, 31, 32], x))
