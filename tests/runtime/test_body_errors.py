"""NumPy bodies that leave writes unfilled."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from etc_dist.compiler import compile
from etc_dist.errors import EtcDistError, GraphError
from etc_dist.ir import GraphFunction, device_function
from etc_dist.runtime.cpu import CpuExecutor, simulate
from etc_dist.schedule import schedule_static
from etc_dist.world import start
from tests.graphs.calls import Task, calls, one_call


def graph_of(body: Any, dtype: str) -> GraphFunction:
    """`body` computes y[i] from x[i], four rows of three per task."""
    function = device_function(source="", reads=1, writes=1)(body)
    return one_call(1, function, [f"x 8/4 3 {dtype}"], [f"y 8/4 3 {dtype}"])


def forgets(x: Any, y: Any) -> None:
    y[:, :2] = x[:, :2]
    y[:3, 2] = x[:3, 2]


def accumulates(x: Any, y: Any) -> None:
    y[...] = 2 * y + x


def copies(x: Any, y: Any) -> None:
    y[...] = x


def run(body: Any, dtype: str, x: Any) -> Any:
    plan = schedule_static(graph_of(body, dtype))
    return simulate(plan, [{"x": x}], {}, check=False).outputs[0]["y"]


@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_an_element_that_a_body_leaves_unwritten_is_named(dtype):
    with pytest.raises(GraphError) as caught:
        run(forgets, dtype, np.ones((8, 3), dtype))
    error = caught.value
    assert error.what == (
        "the body of call forgets leaves elements of an output unwritten"
    )
    assert error.where.startswith("rank 0, worker ")
    assert error.got in (
        "y[3, 2] is unwritten, the first of 1",
        "y[7, 2] is unwritten, the first of 1",
    )
    assert error.fix == "in forgets, assign to all of it: y[...] = ..."


@pytest.mark.mpi
@pytest.mark.parametrize("kind", ["local", "symmetric"])
def test_a_tensor_that_no_body_fills_is_named_once(kind, world, capsys):
    @device_function(source="", reads=1, writes=1)
    def returns_early(x: Any, z: Any) -> None:
        return

    row, copy = "2[i] n float32", device_function(source="", reads=1, writes=1)(copies)
    by_row, event = {"grid": "i: 2"}, ["ready[i]"]
    tasks = [
        Task(returns_early, [f"x {row}"], [f"z {row}"], notifies=event, **by_row),
        Task(copy, [f"z {row}"], [f"y {row}"], waits=event, **by_row),
    ]
    options = {"parts": "events ready [2] expects 1", "kinds": {"z": kind}}
    cpu_world = start(replace(world.settings, backend="cpu"))
    graph = calls(cpu_world.size, tasks=tasks, **options)
    executor = CpuExecutor(schedule_static(graph), cpu_world)
    arrays = {name: np.ones((2, 4), np.float32) for name in "xy"}
    for _ in range(2):
        executor.run(arrays, {"n": 4})
    assert np.isnan(arrays["y"]).all()
    text = f"no body has filled z, a {kind} tensor of calls, on rank {world.rank}:"
    assert capsys.readouterr().err.count(text) == 1
    executor.close()
    cpu_world.close()


@pytest.mark.mpi
def test_no_tensor_is_named_that_a_rank_without_rows_does_not_fill(world, capsys):
    @device_function(source="", reads=1, writes=1)
    def first_rows(x: Any, z: Any) -> None:
        z[: len(x)] = x

    parts = """
        own_rows rows most
        input x [rows, 4] float32
        local z [most, 4] float32
        local y [most, 4] float32
        events ready [1] expects 1
    """
    x, y, z = (f"{name}[span(0, most), :]" for name in "xyz")
    tasks = [
        Task(first_rows, [x], [z], notifies=["ready[0]"]),
        Task(first_rows, [z], [y], waits=["ready[0]"], name="again"),
    ]
    cpu_world = start(replace(world.settings, backend="cpu"))
    graph = calls(cpu_world.size, tasks=tasks, parts=parts)
    with cpu_world, compile(graph, cpu_world) as program:
        program.run(x=np.ones((4 * (world.rank > 0), 4), np.float32))
        program.synchronize()
    assert "no body has filled" not in capsys.readouterr().err


def test_a_body_that_reads_its_output_is_refused():
    with pytest.raises(GraphError, match="leaves elements of an output unwritten"):
        run(accumulates, "float32", np.ones((8, 3), np.float32))


def test_results_that_look_unwritten_are_results():
    minus = np.full((8, 3), -1, np.int32)
    assert (run(copies, "int32", minus) == -1).all()
    nan = minus.view(np.float32)
    assert np.isnan(run(copies, "float32", nan)).all()


def test_an_error_in_a_body_names_its_task():
    def broken(x: Any, y: Any) -> None:
        raise ValueError("a fault")

    with pytest.raises(ValueError, match="a fault") as caught:
        run(broken, "float32", np.ones((8, 3), np.float32))
    (note,) = caught.value.__notes__
    assert note.startswith("in rank 0, worker ") and "lane: broken[" in note


def test_a_body_that_returns_its_result_is_refused():
    def doubles(x: Any, y: Any) -> Any:
        return 2 * x

    with pytest.raises(GraphError) as caught:
        run(doubles, "float32", np.ones((8, 3), np.float32))
    assert "returned a value" in caught.value.what
    assert (caught.value.got, caught.value.wanted[:5]) == ("ndarray", "None:")
    assert "assign to y[...] instead of returning" in caught.value.fix


def test_a_body_that_writes_its_operand_fails():
    def halves(x: Any, y: Any) -> None:
        y[...] = x
        x *= 0.5

    with pytest.raises(ValueError, match="read-only"):
        run(halves, "float32", np.ones((8, 3), np.float32))


@pytest.mark.mpi
def test_a_run_names_what_is_unwritten(world):
    cpu_world = start(replace(world.settings, backend="cpu"))
    plan = schedule_static(
        replace(graph_of(forgets, "float32"), world_size=cpu_world.size)
    )
    executor = CpuExecutor(plan, cpu_world)
    x = np.ones((8, 3), np.float32)
    with pytest.raises(EtcDistError, match="leaves elements of an output unwritten"):
        executor.run({"x": x, "y": np.zeros_like(x)}, {})
    executor.close()
    cpu_world.close()


def test_a_body_that_changes_a_tensor_in_place_counts_once():
    def start(x: Any, total: Any) -> None:
        total[...] = x

    def step(before: Any, x: Any, total: Any, y: Any) -> None:
        y[...] = np.where(x > 0, x, -1)  # what an unwritten element looks like
        total[...] = before + x

    writer, copier = (device_function(source="", reads=n, writes=n) for n in (1, 2))
    parts = """
        local total [4] int32
        events begun [1] expects 1
        events done [1] expects 1
    """
    tasks = [
        Task(writer(start), ["x 4 int32"], ["total[:]"], notifies=["begun[0]"]),
        Task(
            copier(step),
            ["total[:]", "x 4 int32"],
            ["total[:]", "y 4 int32"],
            waits=["begun[0]"],
            notifies=["done[0]"],
        ),
        Task(writer(copies), ["total[:]"], ["z 4 int32"], waits=["done[0]"]),
    ]
    x = np.array([1, 2, 3, -4], np.int32)
    outputs = simulate(
        schedule_static(calls(1, tasks=tasks, parts=parts)), [{"x": x}], {}
    ).outputs[0]
    np.testing.assert_array_equal(outputs["z"], 2 * x)
