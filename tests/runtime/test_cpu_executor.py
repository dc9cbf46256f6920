"""The CPU backend between processes: results, changing dims, and failed runs."""

from __future__ import annotations

import os
import time
import traceback
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from etc_dist.errors import ArgumentError, EtcDistError, WaitTimeoutError, WorldError
from etc_dist.ir import device_function
from etc_dist.runtime.arrays import inspect
from etc_dist.runtime.cpu import CpuExecutor
from etc_dist.runtime.trace import Trace
from etc_dist.schedule import schedule_dynamic, schedule_static
from etc_dist.world import World, start
from tests.graphs.permute import inputs, permute
from tests.graphs.ring import doubled_ring
from tests.runtime.programs import OPS, case, plan_of, ring_inputs, with_call

pytestmark = pytest.mark.mpi

LIMIT = 0.5


@pytest.fixture(scope="module")
def short_timeout(world):
    """A world with a short wait limit."""
    new_world = start(replace(world.settings, backend="cpu", wait_limit=LIMIT))
    yield new_world
    new_world.close()


@pytest.fixture(scope="module")
def cpu_world(world):
    new_world = start(replace(world.settings, backend="cpu"))
    yield new_world
    new_world.close()


def filled(executor: CpuExecutor, c, rank: int) -> np.ndarray:
    y = np.zeros(c.expected[rank].shape, c.inputs[rank]["x"].dtype)
    executor.run({**c.inputs[rank], "y": y}, c.dims)
    return y


@pytest.mark.mpi(ranks=[1, 2, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("op", OPS)
def test_a_run_gives_the_reference(op, dtype, cpu_world, rng):
    c = case(op, cpu_world.size, rng, (40, 24, 32), dtype)
    executor = CpuExecutor(c.plan, cpu_world)
    for _ in range(3):
        c.check(cpu_world.rank, filled(executor, c, cpu_world.rank))
    executor.close()


@pytest.mark.parametrize("op", OPS)
def test_dims_may_change_between_runs(op, cpu_world, rng):
    executor = CpuExecutor(plan_of(op, cpu_world.size), cpu_world)
    for dims in [(16, 16, 8), (5, 7, 3), (48, 33, 16), (16, 16, 8), (1, 50, 4)]:
        c = case(op, cpu_world.size, rng, dims)
        for _ in range(2):
            c.check(cpu_world.rank, filled(executor, c, cpu_world.rank))
    executor.close()


def test_the_trace_has_every_task_of_this_rank(cpu_world, rng):
    c = case("all_gather_matmul", cpu_world.size, rng)
    executor = CpuExecutor(c.plan, cpu_world)
    filled(executor, c, cpu_world.rank)
    filled(executor, c, cpu_world.rank)
    assert {record.rank for record in executor.trace().records} == {cpu_world.rank}
    assert len(executor.trace().records) == 8 + (cpu_world.size - 1) * (4 * 4 + 8)
    traces = cpu_world.gather(executor.trace())
    whole = Trace.merge(trace for trace in traces if isinstance(trace, Trace))
    assert len(whole.records) == cpu_world.size * len(executor.trace().records)
    assert "Bars are as long as the simulated tasks' CPU time" in whole.notes[0]
    executor.close()


def test_time_of_other_processes_does_not_lengthen_a_task(cpu_world):
    @device_function(source="", reads=1, writes=1, lane="transfer")
    def sleeps(x, box):
        time.sleep(0.1)
        box[...] = x

    executor = ring_on(cpu_world, send=sleeps)
    run_ring(executor, cpu_world)
    sends = [r for r in executor.trace().records if r.call == "send"]
    assert {record.label for record in sends} == {"send[0]", "send[1]"}
    assert all(0 <= record.end_ns - record.start_ns < 50e6 for record in sends)
    executor.close()


def ring_on(world: World, **options: Any) -> CpuExecutor:
    return CpuExecutor(schedule_static(doubled_ring(world.size, **options)), world)


def run_ring(executor: CpuExecutor, world: World) -> np.ndarray:
    y = np.zeros(8, np.float32)
    executor.run({**ring_inputs(world.rank, 8), "y": y}, {"rows": 8})
    return y


def doubled(world: World) -> list[float]:
    previous = (world.rank - 1) % world.size
    return [2.0 * (i + 100 * previous) for i in range(8)]


@pytest.mark.mpi(ranks=[4])
def test_a_rank_that_never_notifies_ends_the_run_on_all_ranks(short_timeout):
    last = short_timeout.size - 1
    good = schedule_static(doubled_ring(short_timeout.size))
    bad = with_call(good, "send", notifies=()) if short_timeout.rank == last else good
    executor = CpuExecutor(bad, short_timeout)
    with pytest.raises(WaitTimeoutError) as caught:
        run_ring(executor, short_timeout)
    assert f"within {LIMIT:g} s" in caught.value.wanted
    # Only the last rank's neighbour has unmet waits; all ranks report them.
    assert {record.rank for record in caught.value.records} == {0}
    assert {record.task for record in caught.value.records} == {
        "take[0]",
        "take[1]",
    }
    record = caught.value.records[0]
    assert (record.lane, record.have, record.want) == ("tensor", 0, 1)
    assert f"{record.task} waits for {record.event}: have 0" in str(caught.value)
    assert len(set(short_timeout.gather(str(caught.value)))) == 1
    executor.close()
    again = CpuExecutor(good, short_timeout)
    assert run_ring(again, short_timeout).tolist() == doubled(short_timeout)
    again.close()


@pytest.mark.mpi(ranks=[2])
def test_a_slow_task_of_a_peer_is_no_timeout(short_timeout):
    @device_function(source="", reads=1, writes=1, lane="transfer")
    def slow(x, box):
        time.sleep(0.4 * LIMIT if short_timeout.rank == 0 else 0)
        box[...] = x

    executor = ring_on(short_timeout, send=slow)
    y = np.zeros(24, np.float32)
    executor.run({**ring_inputs(short_timeout.rank, 24), "y": y}, {"rows": 24})
    assert y[0] == doubled(short_timeout)[0]
    executor.close()


@pytest.mark.parametrize("error", [ValueError, ArgumentError, WorldError])
def test_an_error_in_a_body_ends_the_run_on_all_ranks(error, short_timeout):
    failing = [True]
    is_own_error = issubclass(error, EtcDistError)
    parts = dict.fromkeys(("where", "wanted", "got", "fix"), "") if is_own_error else {}

    @device_function(source="", reads=1, writes=1, lane="transfer")
    def broken(x, box):
        if failing[0] and short_timeout.rank == 0:
            raise error("a fault of rank 0", **parts)
        box[...] = x

    executor = ring_on(short_timeout, send=broken)
    kind = error if short_timeout.rank == 0 else WorldError
    with pytest.raises(kind, match="a fault of rank 0") as caught:
        run_ring(executor, short_timeout)
    if short_timeout.rank:
        assert "a task failed on rank 0" in str(caught.value)
        assert "send[" in str(caught.value) and "in broken" in str(caught.value)
        # Only rank 0 shows the whole traceback.
        assert "Traceback" not in str(caught.value)
    failing[0] = False
    assert run_ring(executor, short_timeout).tolist() == doubled(short_timeout)
    executor.close()


@pytest.mark.parametrize("error", [None, ArgumentError, SystemExit])
def test_a_child_that_a_body_forks_leaves_the_run_alone(error, cpu_world):
    parts = dict.fromkeys(("where", "wanted", "got", "fix"), "")

    @device_function(source="", reads=1, writes=1, lane="transfer")
    def forks(x, box):
        box[...] = x
        child = os.fork()
        if child:
            os.waitpid(child, 0)
        elif error is not None:
            raise error("x", **parts) if error is ArgumentError else error

    executor, parent = ring_on(cpu_world, send=forks), os.getpid()
    try:
        y = run_ring(executor, cpu_world)
    finally:
        if os.getpid() != parent:
            os._exit(0)
    assert y.tolist() == doubled(cpu_world)
    executor.close()


def test_an_error_that_cannot_be_pickled_ends_the_run_on_all_ranks(cpu_world):
    class Own(ArgumentError):
        pass

    parts = dict.fromkeys(("where", "wanted", "got", "fix"), "")

    @device_function(source="", reads=1, writes=1, lane="transfer")
    def fails(x, box):
        error = Own("of a user", **parts)
        error.reason = lambda: 0
        raise error

    executor = ring_on(cpu_world, send=fails)
    # A rank whose own task has not failed yet gets the first one's error as text.
    with pytest.raises(EtcDistError, match="of a user"):
        run_ring(executor, cpu_world)
    assert not cpu_world.broken
    executor.close()


def test_no_body_warns_of_nan(cpu_world):
    @device_function(source="", reads=1, writes=1, lane="transfer")
    def divide(x, box):
        box[...] = (x - x) / (x - x)

    executor = ring_on(cpu_world, send=divide)
    with warnings.catch_warnings(action="error"):
        assert np.isnan(run_ring(executor, cpu_world)).all()
    executor.close()


def test_bad_arrays_of_one_rank_end_the_run_on_all_ranks(short_timeout):
    executor = ring_on(short_timeout)
    arrays = {**ring_inputs(short_timeout.rank, 8), "y": np.zeros(8, np.float32)}
    if short_timeout.rank == 0:
        del arrays["y"]
    with pytest.raises((ArgumentError, WorldError), match=r"no y") as caught:
        executor.run(arrays, {"rows": 8})
    text = "".join(traceback.format_exception(caught.value))
    assert text.count(caught.value.what) == 1
    assert run_ring(executor, short_timeout).tolist() == doubled(short_timeout)
    executor.close()


@pytest.mark.parametrize("schedule", [schedule_static, schedule_dynamic])
def test_more_notifications_than_a_loaded_count_are_an_error(schedule, cpu_world):
    graph = permute(cpu_world.size, miscounted=-1)
    executor = CpuExecutor(schedule(graph), cpu_world)
    arrays = inputs([1, 1, 1, 1])
    with pytest.raises(ArgumentError) as caught:
        executor.run({**arrays, "y": np.zeros_like(arrays["x"])}, {"n": 4})
    assert "lane: move_row[" in caught.value.where
    assert "3 notifications of filled[1] of rank" in caught.value.wanted
    assert caught.value.got == "4 or more"
    assert len(set(cpu_world.gather(str(caught.value)))) == 1
    executor.close()


def test_a_launch_reads_and_fills_the_memory_of_any_library(cpu_world):
    class Foreign:
        """An array of another library: an address only."""

    executor = ring_on(cpu_world)
    memory = {**ring_inputs(cpu_world.rank, 8), "y": np.zeros(8, np.float32)}
    foreign = {
        name: replace(inspect(name, array), owner=Foreign())
        for name, array in memory.items()
    }
    launch = executor.prepare(foreign, {"rows": 8})
    assert executor.is_current(launch)
    executor.launch(launch)
    assert memory["y"].tolist() == doubled(cpu_world)
    executor.close()


def test_closing_twice_does_nothing(cpu_world):
    executor = ring_on(cpu_world)
    run_ring(executor, cpu_world)
    executor.close()
    executor.close()
