"""The scheduling cost of a task, measured on almost empty tasks under each schedule.

launch/mpirun -n 1 benchmarks/task_cost.py
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.device import Call, Device, Gpu
from benchmarks.harness import begin, parser_for, provenance, record, say
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
    groups = g.let("groups", (rows + GROUP - 1) // GROUP)
    x = g.input("x", (rows, WIDTH), "float32")
    y = g.output("y", (rows, WIDTH), "float32")
    between = g.local("between", (rows, WIDTH), "float32")
    copied = g.events(
        "copied", (groups,), expects=lambda i: minimum(GROUP, rows - i * GROUP)
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
    found: list[Call] = []
    for each in (FEW, MANY):
        rows = each * program.workers
        x = device.normal(device.empty((rows, WIDTH), "float32"), each)
        y = device.xp.zeros_like(x)
        found.append(partial(program.run, x=x, y=y))
        found[-1]()
        program.synchronize()
        if not bool((x == y).all()):
            raise SystemExit(f"FAILED: {rows} rows were not copied")
    return found


def cost_ns(gpu: Gpu, calls: Sequence[Call]) -> float:
    """Nanoseconds that a task takes a worker."""
    few, many = (median(gpu.time(call) for _ in range(REPEATS)) for call in calls)
    return round((many - few) * 1e6 / (MANY - FEW) / 2, 1)


def main() -> int:
    options = parser_for("Time the scheduling of tasks.", "task_cost").parse_args()
    device = begin(options.cpu)
    world = device.world
    for lane, schedule in product((TENSOR, TRANSFER), SCHEDULES):
        graph = copy_twice(world.size, lane=lane)
        with compile(graph, world, schedule=schedule) as program:
            calls = runs(device, program)
            text = "rows were copied"
            if isinstance(device, Gpu):
                facts, cost = device.machine(), cost_ns(device, calls)
                values = {"op": "task_cost", "protocol": PROTOCOL, **facts}
                values |= {"schedule": schedule, "lane": lane, "task_ns": cost}
                values |= {"workers": program.workers, **provenance(program)}
                record(device, options.record, values)
                text = f"{cost:.0f} ns per task and worker"
        say(world, f"{lane} lane, {schedule}: {text}")
    world.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
