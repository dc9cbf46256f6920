"""The CPU backend between processes: results, changing dims, and ends by an error."""

from __future__ import annotations

import time
import traceback
import warnings
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from etc_dist.errors import ArgumentError, WaitTimeoutError, WorldError
from etc_dist.ir import device_function
from etc_dist.runtime.arrays import inspect
from etc_dist.runtime.cpu import CpuExecutor
from etc_dist.runtime.cpu.executor import TaskTimes
from etc_dist.runtime.trace import Trace
from etc_dist.schedule import schedule_dynamic, schedule_static
from etc_dist.world import World, start
from tests.runtime.permute import inputs, permute
from tests.runtime.programs import OPS, case, plan_of, ring, ring_inputs, with_call

pytestmark = pytest.mark.mpi

LIMIT = 0.5


@pytest.fixture(scope="module")
def hasty(world):
    """A world whose waits end soon."""
    made = start(replace(world.settings, backend="cpu", wait_limit=LIMIT))
    yield made
    made.close()


@pytest.fixture(scope="module")
def calm(world):
    made = start(replace(world.settings, backend="cpu"))
    yield made
    made.close()


def filled(executor: CpuExecutor, c, rank: int) -> np.ndarray:
    y = np.zeros(c.expected[rank].shape, c.inputs[rank]["x"].dtype)
    executor.run({**c.inputs[rank], "y": y}, c.dims)
    return y


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("op", OPS)
def test_a_run_gives_the_reference(op, dtype, calm, rng):
    c = case(op, calm.size, rng, (40, 24, 32), dtype)
    executor = CpuExecutor(c.plan, calm)
    for _ in range(3):
        c.check(calm.rank, filled(executor, c, calm.rank))
    executor.close()


@pytest.mark.parametrize("op", OPS)
def test_dims_may_change_between_runs(op, calm, rng):
    executor = CpuExecutor(plan_of(op, calm.size), calm)
    for dims in [(16, 16, 8), (5, 7, 3), (48, 33, 16), (16, 16, 8), (1, 50, 4)]:
        c = case(op, calm.size, rng, dims)
        for _ in range(2):
            c.check(calm.rank, filled(executor, c, calm.rank))
    executor.close()


def test_the_trace_has_every_task_of_this_rank(calm, rng):
    c = case("all_gather_matmul", calm.size, rng)
    executor = CpuExecutor(c.plan, calm)
    filled(executor, c, calm.rank)
    filled(executor, c, calm.rank)
    assert {record.rank for record in executor.trace().records} == {calm.rank}
    assert len(executor.trace().records) == 4 + (calm.size - 1) * (2 * 8 + 4)
    heard = calm.gather(executor.trace())
    whole = Trace.merge(trace for trace in heard if isinstance(trace, Trace))
    assert len(whole.records) == calm.size * len(executor.trace().records)
    assert "Bars are as long as the simulated tasks' CPU time" in whole.notes[0]
    executor.close()


def test_time_of_other_processes_does_not_lengthen_a_task():
    times = TaskTimes()
    call = SimpleNamespace(name="add")
    task = SimpleNamespace(
        rank=0, worker=1, lane="tensor", call=call, t=2, coordinate=(3,)
    )
    times.enter(task)
    time.sleep(0.1)
    times.leave(task)
    (record,) = times.records
    assert record.label == "add[3]"
    assert 0 <= record.end_ns - record.start_ns < 50e6


def run_ring(executor: CpuExecutor, world: World, count: int = 1) -> np.ndarray:
    y = np.zeros(8, np.float32)
    executor.run({**ring_inputs(world.rank, 8, count), "y": y}, {"n": 8})
    return y


def doubled(world: World) -> list[float]:
    previous = (world.rank - 1) % world.size
    return [2.0 * (i + 100 * previous) for i in range(8)]


def test_a_rank_that_never_notifies_ends_the_run_on_all_ranks(hasty):
    last = hasty.size - 1
    good = schedule_static(ring(hasty.size))
    bad = with_call(good, "send", notifies=()) if hasty.rank == last else good
    executor = CpuExecutor(bad, hasty)
    began = time.monotonic()
    with pytest.raises(WaitTimeoutError) as caught:
        run_ring(executor, hasty)
    assert LIMIT <= time.monotonic() - began < LIMIT + 3
    # Only the last rank's neighbour waited in vain, yet all have its words.
    assert {record.rank for record in caught.value.records} == {0}
    assert {record.task for record in caught.value.records} == {
        "double[0]",
        "double[1]",
    }
    record = caught.value.records[0]
    assert (record.lane, record.have, record.want) == ("tensor", 0, 1)
    assert f"{record.task} waits for {record.event}: have 0" in str(caught.value)
    assert len(set(hasty.gather(str(caught.value)))) == 1
    executor.close()
    again = CpuExecutor(good, hasty)
    assert run_ring(again, hasty).tolist() == doubled(hasty)
    again.close()


def test_the_same_program_runs_after_a_timeout(hasty):
    executor = CpuExecutor(schedule_static(ring(hasty.size, loaded=True)), hasty)
    for _ in range(2):
        assert run_ring(executor, hasty).tolist() == doubled(hasty)
        with pytest.raises(WaitTimeoutError, match="have 1, want 2"):
            run_ring(executor, hasty, count=2)
        assert run_ring(executor, hasty).tolist() == doubled(hasty)
    executor.close()


@pytest.mark.mpi(min_size=2)
def test_a_slow_task_of_a_peer_is_no_timeout(hasty):
    @device_function(source="", reads=1, writes=1, lane="transfer")
    def slow(x, box):
        time.sleep(0.4 * LIMIT if hasty.rank == 0 else 0)
        box[...] = x

    executor = CpuExecutor(schedule_static(ring(hasty.size, function=slow)), hasty)
    y = np.zeros(24, np.float32)
    executor.run({**ring_inputs(hasty.rank, 24), "y": y}, {"n": 24})
    assert y[0] == doubled(hasty)[0]
    executor.close()


def test_an_error_in_a_body_ends_the_run_on_all_ranks(hasty):
    failing = [True]

    @device_function(source="", reads=1, writes=1, lane="transfer")
    def broken(x, box):
        if failing[0] and hasty.rank == 0:
            raise ValueError("a fault of rank 0")
        box[...] = x

    executor = CpuExecutor(schedule_static(ring(hasty.size, function=broken)), hasty)
    kind = ValueError if hasty.rank == 0 else WorldError
    began = time.monotonic()
    with pytest.raises(kind, match="a fault of rank 0") as caught:
        run_ring(executor, hasty)
    assert time.monotonic() - began < LIMIT
    if hasty.rank:
        assert "a task failed on rank 0" in str(caught.value)
        assert "send[" in str(caught.value) and "in broken" in str(caught.value)
        # The whole traceback is rank 0's to show.
        assert "Traceback" not in str(caught.value)
    failing[0] = False
    assert run_ring(executor, hasty).tolist() == doubled(hasty)
    executor.close()


def test_no_body_warns_of_nan(calm):
    @device_function(source="", reads=1, writes=1, lane="transfer")
    def divide(x, box):
        box[...] = (x - x) / (x - x)

    executor = CpuExecutor(schedule_static(ring(calm.size, function=divide)), calm)
    with warnings.catch_warnings(action="error"):
        assert np.isnan(run_ring(executor, calm)).all()
    executor.close()


def test_bad_arrays_of_one_rank_end_the_run_on_all_ranks(hasty):
    executor = CpuExecutor(schedule_static(ring(hasty.size)), hasty)
    arrays = {**ring_inputs(hasty.rank, 8), "y": np.zeros(8, np.float32)}
    if hasty.rank == 0:
        del arrays["y"]
    with pytest.raises((ArgumentError, WorldError), match=r"no y") as caught:
        executor.run(arrays, {"n": 8})
    shown = "".join(traceback.format_exception(caught.value))
    assert shown.count(caught.value.what) == 1
    assert run_ring(executor, hasty).tolist() == doubled(hasty)
    executor.close()


@pytest.mark.parametrize("schedule", [schedule_static, schedule_dynamic])
def test_more_notifications_than_a_loaded_count_are_told(schedule, calm):
    graph = permute(calm.size, miscounted=-1)
    executor = CpuExecutor(schedule(graph), calm)
    given = inputs([1, 1, 1, 1])
    with pytest.raises(ArgumentError) as caught:
        executor.run({**given, "y": np.zeros_like(given["x"])}, {"n": 4})
    assert "lane: move_row[" in caught.value.where
    assert "3 notifications of filled[1] of rank" in caught.value.wanted
    assert caught.value.got == "4 or more"
    assert len(set(calm.gather(str(caught.value)))) == 1
    executor.close()


def test_a_launch_reads_and_fills_the_memory_of_any_library(calm):
    class Foreign:
        """Someone else's array: nothing but an address."""

    executor = CpuExecutor(schedule_static(ring(calm.size)), calm)
    memory = {**ring_inputs(calm.rank, 8), "y": np.zeros(8, np.float32)}
    foreign = {
        name: replace(inspect(name, array), owner=Foreign())
        for name, array in memory.items()
    }
    launch = executor.prepare(foreign, {"n": 8})
    assert executor.is_current(launch)
    executor.launch(launch)
    assert memory["y"].tolist() == doubled(calm)
    executor.close()


def test_a_graph_for_another_world_is_refused(calm):
    with pytest.raises(ArgumentError, match=f"a graph for {calm.size + 1}"):
        CpuExecutor(schedule_static(ring(calm.size + 1)), calm)


def test_closing_twice_does_nothing(calm):
    executor = CpuExecutor(schedule_static(ring(calm.size)), calm)
    run_ring(executor, calm)
    executor.close()
    executor.close()
