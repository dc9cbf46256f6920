"""Compare predicted with measured times of the collectives over two hosts, where the
transport has several delays and rates.

export NVSHMEM_REMOTE_TRANSPORT=ibrc FAR_PLUGIN=.../nvshmem_transport_ibrc.so.3
launch/mpirun -n 2 --pretend-hosts 2 --mps bash tests/far_transport/rank.sh \\
    .venv/bin/python benchmarks/run.py predict

The link alone is measured by a graph of messages, the times of tasks by a trace of the
fastest setting, while both ranks share the GPU. --records compares predictions by the
model of a GPU with the records of one host, without a GPU. Predictions must be within
15 % where the bytes bound a run."""

from __future__ import annotations

import ctypes
import os
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np

from benchmarks import records
from benchmarks.device import Call, Device, Gpu
from benchmarks.harness import Result, Run, Subject
from etc_dist import compile
from etc_dist.functions.push_far import push_far
from etc_dist.functions.push_rows import push_rows
from etc_dist.ir import Graph, GraphFunction, graph_function
from etc_dist.ops.all_gather_matmul import all_gather_matmul_graph
from etc_dist.ops.matmul_reduce_scatter import matmul_reduce_scatter_graph
from etc_dist.ops.tuning import default_tuning
from etc_dist.predict.machine import Link, Machine
from etc_dist.predict.simulation import PredictedRun, simulate_run
from etc_dist.predict.table import with_tiles
from etc_dist.predict.times import ModelTimes, TracedTimes
from etc_dist.program import Program
from etc_dist.runtime import gpu as gpu_backend
from etc_dist.runtime.occupancy import resident_workers
from etc_dist.schedule import schedule_static

PLUGIN = "FAR_PLUGIN"
"""The environment variable with the file of the transport."""
WORKERS = 4
"""Of a rank: few, so that computing takes longer than the transport's own time."""
BLOCKS, RUNS = 5, 4
"""Measured blocks of runs, of which the median counts."""
SMALL, LARGE, MANY = 32, 32768, 32
"""Floats of a message, and messages, by which the link is measured."""
LINK_BOUND_TOLERANCE = 0.15
"""The allowed error where the bytes bound the run."""
PROTOCOL = (
    f"{RUNS} runs in a row by the host's clock, max over ranks, median of {BLOCKS} "
    "blocks; tasks by the mean of a trace of the first setting"
)


class Setting(NamedTuple):
    """What the transport adds to its own delay, and its largest rate; 0: no limit."""

    name: str
    delay_us: float
    gbs: float


SETTINGS = Setting("fast", 0, 0), Setting("even", 200, 0.45), Setting("slow", 1000, 0.1)
GRAPHS: Mapping[str, Callable[..., GraphFunction]] = {
    "matmul_reduce_scatter": matmul_reduce_scatter_graph,
    "all_gather_matmul": all_gather_matmul_graph,
}
DIMS: Mapping[str, Mapping[str, int]] = {
    "matmul_reduce_scatter": {"rows": 1024, "n": 2048, "k": 32768},
    "all_gather_matmul": {"rows": 1024, "n": 32768, "k": 4096},
}
CPU_DIMS = {"rows": 264, "n": 520, "k": 72}


@graph_function
def send_many(g: Graph) -> None:
    """x [messages, floats] -> y of the partner, by as many messages."""
    messages, floats = g.dims("messages floats")
    partner = (g.rank + 1) % g.world_size
    x = g.input("x", (messages, floats), "float32")
    y = g.output("y", (messages, floats), "float32")
    staged = g.symmetric("staged", (messages, floats), "float32")
    far_rows = g.symmetric("arrived", (messages, floats), "float32")
    ready = g.events("ready", (messages,), expects=1)
    come = g.events("come", (messages,), expects=1, cross_rank=True)
    (i,) = grid = g.grid(i=messages)
    g.call(
        push_rows(),
        grid,
        name="stage",
        reads=[x[i, :]],
        writes=[staged[i, :]],
        notifies=[ready[i]],
    )
    g.call(
        push_far(),
        grid,
        name="send",
        reads=[staged[i, :]],
        writes=[far_rows.on(partner)[i, :]],
        waits=[ready[i]],
        notifies=[come.on(partner)[i]],
    )
    g.call(
        push_rows(),
        grid,
        name="collect",
        reads=[far_rows[i, :]],
        writes=[y[i, :]],
        waits=[come[i]],
    )


def use_workers(most: int) -> None:
    """Let later programs have at most so many workers on a GPU."""

    def limited(name: str, **shares: int) -> int:
        return min(most, resident_workers(name, **shares))

    setattr(gpu_backend, resident_workers.__name__, limited)


def set_transport(device: Device, setting: Setting) -> None:
    """On all ranks. Collective."""
    device.synchronize()
    device.world.barrier()
    if isinstance(device, Gpu):
        library = ctypes.CDLL(os.environ[PLUGIN])
        library.far_transport_set(
            *map(ctypes.c_double, (setting.delay_us, setting.gbs, 0.0))
        )
    device.world.barrier()


def run_us(device: Device, program: Program, call: Call) -> float:
    """Microseconds of a run, the slowest rank's. Collective."""
    call()
    program.synchronize()
    blocks = BLOCKS if isinstance(device, Gpu) else 1
    times = device.host_us(call, blocks, RUNS, waits=True)
    program.synchronize()
    return float(np.median(times))


def measure_link(device: Device, machine: Machine) -> Link:
    """The transport's own link, which needs no setting: small messages give the cost of
    a message, large ones the rate, a single one the latency."""
    times = {}
    with compile(send_many(2, local_size=1), device.world) as program:
        for messages, floats in ((1, SMALL), (MANY, SMALL), (1, LARGE), (MANY, LARGE)):
            x = device.random((messages, floats), "float32", "x")
            y = device.xp.zeros_like(x)
            call = partial(program.run, x=x, y=y)
            times[messages, floats] = run_us(device, program, call)
    message, large = (
        max((times[MANY, n] - times[1, n]) / (MANY - 1), 0.1) for n in (SMALL, LARGE)
    )
    # A start, a message and an acknowledgement pass the link one after the other.
    passes = times[1, SMALL] - machine.launch_us - 2 * message
    gbs = LARGE * 4 / max(large, message) / 1e3
    return Link("far", gbs, max(passes / 3, 0.0), message)


def with_setting(own_link: Link, setting: Setting) -> Link:
    gbs = min(own_link.gbs, setting.gbs or own_link.gbs)
    return Link("far", gbs, own_link.latency_us + setting.delay_us, own_link.message_us)


class Case:
    """A collective at one shape."""

    def __init__(self, device: Device, name: str, dims: Mapping[str, int]):
        self.name, self.device = name, device
        world = device.world
        graph = GRAPHS[name](world.size, local_size=1)
        self.dims = with_tiles(graph, dims, Machine().workers)
        self.tiles = {n: value for n, value in self.dims.items() if n not in dims}
        env = graph.environment(self.dims, world.rank)
        self.arrays = {}
        for tensor in (*graph.inputs(), *graph.outputs()):
            shape = tuple(int(n.evaluate(env)) for n in tensor.shape)
            text = f"{tensor.name} {world.rank}"
            self.arrays[tensor.name] = device.random(shape, tensor.dtype, text)
        with compile(graph, world, trace=True) as program:
            for _ in range(3):
                program.run(**self.arrays, dims=self.tiles)
            program.synchronize()
            self.times = TracedTimes.of(graph, program.trace())
        self.program = compile(graph, world)
        self.first: Any = None

    def predict(self, link: Link) -> PredictedRun:
        machine = Machine(workers=self.program.workers, far=link)
        return simulate_run(self.program.plan, self.dims, self.times, machine)

    def run(self) -> None:
        self.program.run(**self.arrays, dims=self.tiles)

    def repeats(self) -> bool:
        """Whether the result has the first one's bits, on all ranks. Collective."""
        self.device.synchronize()
        y = self.arrays["y"]
        if self.first is None:
            self.first = y.copy()
        is_same = not bool(self.device.differs(y, self.first))
        return all(cast(list[bool], self.device.world.gather(is_same)))


def compare(
    device: Device, case: Case, own_link: Link, setting: Setting
) -> dict[str, Any]:
    """The fields of a record. Collective."""
    set_transport(device, setting)
    measured = run_us(device, case.program, case.run)
    link = with_setting(own_link, setting)
    predicted = case.predict(link)
    return {
        "program": case.name,
        "dims": dict(case.dims),
        "setting": setting.name,
        "delay_us": setting.delay_us,
        "rate_gbs": setting.gbs,
        "link_gbs": round(link.gbs, 4),
        "latency_us": round(link.latency_us, 1),
        "message_us": round(link.message_us, 1),
        "workers": case.program.workers,
        "measured_us": round(measured, 1),
        "predicted_us": round(predicted.us, 1),
        "ratio": round(predicted.us / measured, 4),
        "bounds_us": {name: round(us, 1) for name, us in predicted.bounds.items()},
        "bound_by": predicted.bound_by,
        "bitwise_equal": case.repeats(),
    }


def faults(values: Mapping[str, Any]) -> list[str]:
    """What is wrong with a comparison."""
    if not values["bitwise_equal"]:
        return ["the bits differ from the first setting's"]
    wrong = abs(values["ratio"] - 1) > LINK_BOUND_TOLERANCE
    if values["bound_by"] == "far bytes" and wrong:
        text = f"wanted within {LINK_BOUND_TOLERANCE:.0%}"
        return [f"ratio {values['ratio']}, {text}"]
    return []


def compare_records(run: Run) -> None:
    """Print the predictions for the records of the collectives on several GPUs, but
    those of other programs, which few rows have."""
    tuning = default_tuning()
    for record in records.load():
        if record.op not in GRAPHS:
            continue
        graph = GRAPHS[record.op](record.world_size)
        if not record.path.startswith(f"{graph.name},"):
            continue
        sizes = {"rows": record.M // record.world_size, "n": record.N, "k": record.K}
        plan = schedule_static(graph)
        dims = with_tiles(graph, sizes, Machine().workers)
        us = simulate_run(plan, dims, ModelTimes(tuning), Machine()).us
        run.say(
            f"{record.op} on {record.world_size} {record.device} at {record.commit}: "
            f"{record.M} x {record.N} x {record.K}, predicted {us:.1f} us, measured "
            f"{record.ours_ms * 1e3:.1f} us, ratio {us / record.ours_ms / 1e3:.3f}"
        )


def measure(run: Run) -> Iterator[Result]:
    if run.options.records:
        compare_records(run)
        return
    device, world, workers = run.device, run.device.world, run.options.workers
    is_timed = isinstance(device, Gpu)
    run.shared["protocol"] = PROTOCOL
    use_workers(workers)
    set_transport(device, SETTINGS[0])
    own_link = measure_link(device, Machine(workers=workers))
    run.say(f"the link by itself: {own_link}")
    for name, dims in DIMS.items():
        case = Case(device, name, dims if is_timed else CPU_DIMS)
        plan = case.program.plan
        hosts = f"{world.hosts.count} pretended hosts"
        where = {
            "world_size": world.size,
            "backend": world.backend,
            "path": f"{plan.graph.name}, {plan.schedule} schedule, {hosts}",
        }
        run.say(f"{name}, traced: {dict(case.times.us)}")
        for setting in SETTINGS:
            values = compare(device, case, own_link, setting)
            yield {**where, **values}, faults(values) if is_timed else []
        case.program.close()


def add_options(parser: ArgumentParser) -> None:
    text = "compare predictions with the records of one host, and end"
    parser.add_argument("--records", action="store_true", help=text)
    parser.add_argument("--workers", type=int, default=WORKERS, help="of a rank")


SUBJECTS = {
    "predict": Subject("Compare predicted with measured times.", measure, add_options)
}
