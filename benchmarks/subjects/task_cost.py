"""The scheduling cost of a task, measured on almost empty tasks under each schedule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.device import Call, Device, Gpu
from benchmarks.harness import Result, Run, Subject, provenance
from etc_dist import compile
from etc_dist.ir import (
    DeviceFunction,
    Graph,
    device_function,
    graph_function,
    minimum,
    tile,
)
from etc_dist.ir.function import TENSOR, TRANSFER
from etc_dist.program import Program

WIDTH, GROUP = 32, 8
FEW, MANY = 16, 128
"""Tasks per call and worker of two runs; the cost is their difference."""
REPEATS = 21
SCHEDULES = ("static", "dynamic")
PROTOCOL = (
    "two calls of tasks that copy 128 bytes, every task of the second waits for eight "
    f"of the first; (time of {MANY} tasks a worker and call - time of {FEW}) / "
    f"({MANY} - {FEW}) / 2, medians of {REPEATS}"
)


def copy_row(x: Any, y: Any) -> None:
    y[...] = x


def _function(lane: str) -> DeviceFunction:
    source = Path(__file__).with_name("copy_row.cuh").resolve()
    return device_function(source=source, reads=1, writes=1, lane=lane)(copy_row)


@graph_function
def copy_twice(g: Graph, *, lane: str) -> None:
    """x [rows, 32] -> y [rows, 32], row by row, through another tensor."""
    rows = g.dims("rows")
    num_groups = g.let("groups", (rows + GROUP - 1) // GROUP)
    x = g.input("x", (rows, WIDTH), "float32")
    y = g.output("y", (rows, WIDTH), "float32")
    between = g.local("between", (rows, WIDTH), "float32")
    copied = g.events(
        "copied", (num_groups,), expects=lambda i: minimum(GROUP, rows - i * GROUP)
    )
    copy = _function(lane)
    (i,) = grid = g.grid(i=rows)
    g.call(
        copy,
        grid,
        name="first",
        reads=[x[tile(i, 1), :]],
        writes=[between[tile(i, 1), :]],
        notifies=[copied[i // GROUP]],
    )
    (i,) = grid = g.grid(i=rows)
    g.call(
        copy,
        grid,
        name="second",
        reads=[between[tile(i, 1), :]],
        writes=[y[tile(i, 1), :]],
        waits=[copied[i // GROUP]],
    )


def runs(device: Device, program: Program) -> list[Call]:
    """Checked calls: FEW tasks, and MANY tasks, a worker."""
    calls: list[Call] = []
    for rows_of_worker in (FEW, MANY):
        rows = rows_of_worker * program.workers
        x = device.normal(device.empty((rows, WIDTH), "float32"), rows_of_worker)
        y = device.xp.zeros_like(x)
        calls.append(partial(program.run, x=x, y=y))
        calls[-1]()
        program.synchronize()
        if not bool((x == y).all()):
            raise SystemExit(f"FAILED: {rows} rows were not copied")
    return calls


def cost_ns(gpu: Gpu, calls: Sequence[Call]) -> float:
    """Nanoseconds that a task takes a worker."""
    few, many = (median(gpu.time(call) for _ in range(REPEATS)) for call in calls)
    return round((many - few) * 1e6 / (MANY - FEW) / 2, 1)


def measure(run: Run) -> Iterator[Result]:
    device = run.device
    run.shared["protocol"] = PROTOCOL
    for lane, schedule in product((TENSOR, TRANSFER), SCHEDULES):
        graph = copy_twice(device.world.size, lane=lane)
        with compile(graph, device.world, schedule=schedule) as program:
            calls = runs(device, program)
            values = {"lane": lane, "schedule": schedule, "workers": program.workers}
            if isinstance(device, Gpu):
                values |= {"task_ns": cost_ns(device, calls), **provenance(program)}
            yield values, []


SUBJECTS = {"task_cost": Subject("Time the scheduling of tasks.", measure)}
