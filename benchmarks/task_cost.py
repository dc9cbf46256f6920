"""What scheduling costs a task that does next to nothing, under each schedule.

launch/mpirun -n 1 benchmarks/task_cost.py
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import records
from benchmarks.command import begin, may_record, provenance, teller
from benchmarks.device import Device
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
"""Tasks of each call for each worker of the two runs whose difference is taken."""
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
    """x [rows, 32] -> y [rows, 32], row by row, by way of another tensor."""
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


def cost_ns(device: Device, program: Program) -> float:
    """Nanoseconds that a task takes a worker."""
    times = []
    for each in (FEW, MANY):
        rows = each * program.workers
        x = device.normal((rows, WIDTH), each)
        y = device.xp.zeros_like(x)

        def run(x: Any = x, y: Any = y) -> None:
            program.run(x=x, y=y)

        run()
        program.synchronize()
        if not bool((x == y).all()):
            raise SystemExit(f"FAILED: {rows} rows were not copied")
        times.append(median(device.time(run) for _ in range(REPEATS)))
    return (times[1] - times[0]) * 1e6 / (MANY - FEW) / 2


def main() -> int:
    parser = argparse.ArgumentParser(description="Time the scheduling of tasks.")
    add = parser.add_argument
    add("--record", type=Path, help="default: benchmarks/results/task_cost.jsonl")
    add("--cpu", action="store_true", help="the CPU backend: no performance path")
    options = parser.parse_args()
    device = begin(options.cpu)
    world = device.world
    tell = teller(world)
    facts = device.facts()
    del facts["baseline"]
    for lane in (TENSOR, TRANSFER):
        for schedule in SCHEDULES:
            graph = copy_twice(world.size, lane=lane)
            program = compile(graph, world, schedule=schedule)
            cost = float(np.round(cost_ns(device, program), 1))
            tell(f"{lane} lane, {schedule}: {cost:.0f} ns a task and worker")
            if may_record(world, options.record):
                record = records.TaskCostRecord(
                    op="task_cost",
                    **provenance(program),
                    **records.stamp(),
                    protocol=PROTOCOL,
                    schedule=schedule,
                    lane=lane,
                    workers=program.workers,
                    task_ns=cost,
                    **facts,
                )
                records.append(record, options.record)
            program.close()
    world.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
