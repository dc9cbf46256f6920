"""The protocol: the checks and timing of an operation, and the command line; see
README.md."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, cast

import numpy as np

import etc_dist
from benchmarks import records
from benchmarks.device import Call, Device, Gpu, open_device
from benchmarks.workload import BLOCK, SMALL, TOLERANCE, WARM_UP, Calls, Workload
from etc_dist.ops.operation import Operation
from etc_dist.program import Program
from etc_dist.settings import Settings
from etc_dist.world import World

SCHEDULES = ("static", "dynamic", "auto")
REPEATS = 21
HOST_CALLS, HOST_ROUNDS = 100, 5
Make = Callable[[Device, str, Sequence[int], int], Workload]
"""A workload of a device, a model's name and sizes, and the rows of a rank."""


# ------------------------------------------------------------------- check, then time


def check(case: Workload, ours: Operation) -> tuple[dict[str, Any], list[Any]]:
    """Whether three runs on each input give equal bits, the error of the last one, and
    the references. Collective."""
    numbers = range(case.inputs)
    calls = [case.call(ours, number) for number in numbers]
    equal = [
        bitwise_equal(
            case.device, ours, calls[n], case.outs[n], partial(case.spoil, ours, n)
        )
        for n in numbers
    ]
    references = [case.reference(number) for number in numbers]
    error = case.device.relative_error(case.outs, references)
    return {"error": error, "bitwise_equal": all(equal)}, references


def bitwise_equal(
    device: Device, operation: Operation, call: Call, out: Any, spoil: Call
) -> bool:
    """Whether three runs of a call give equal bits on all ranks; leaves the last in
    `out`, which the call fills.

    Before each run, the output and the operation's own symmetric memory are poisoned,
    and its local memory by `spoil`, where it can: an element there that a run does not
    write or wait for is NaN."""
    call()  # gives the operation memory of this size
    operation.synchronize()
    results = []
    for _ in range(3):
        spoil()
        device.poison(out)
        device.poison_staging(operation)
        device.synchronize()
        device.world.barrier()
        call()
        operation.synchronize()
        results.append(out.copy())
    same = not any(bool(device.differs(results[0], other)) for other in results[1:])
    return all(cast(list[bool], device.world.gather(same)))


def compete(
    gpu: Gpu, case: Workload, ours: Operation, references: list[Any], repeats: int
) -> dict[str, Any]:
    """Check the rivals, release `references`, then time all."""
    rivals = case.rivals(gpu)
    for rival in rivals.values():
        for call in rival.calls:
            call()
    gpu.synchronize()
    errors = {n: gpu.relative_error(r.outs, references) for n, r in rivals.items()}
    references.clear()
    times = measure(gpu, case.timed(gpu, ours, rivals), repeats)
    named = {name: times.pop(name) for name in case.baselines}
    times["baseline"] = min(named.values(), key=median)
    errors["baseline"] = max(errors.pop(name) for name in case.baselines)
    for operation in (o for rival in rivals.values() for o in rival.operations):
        operation.close()
    found = durations(times, *case.limits(median(times["gemm"])))
    if case.baselines != Workload.baselines:
        found["baselines_ms"] = {n: round(median(t), 5) for n, t in named.items()}
    return {**found, **{f"{name}_error": error for name, error in errors.items()}}


def measure(gpu: Gpu, calls: Calls, repeats: int) -> dict[str, list[float]]:
    """Milliseconds of each repeat, the slowest rank's. The calls are timed in blocks
    that alternate, so that heat slows all equally."""
    for call in calls.values():
        for _ in range(WARM_UP):
            call()
    gpu.synchronize()
    mine: dict[str, list[float]] = {name: [] for name in calls}
    for done in range(0, repeats, BLOCK):
        for name, call in calls.items():
            for _ in range(min(BLOCK, repeats - done)):
                mine[name].append(gpu.time(call))
    every = cast(list[dict[str, list[float]]], gpu.world.gather(mine))
    return {
        name: [max(each) for each in zip(*(rank[name] for rank in every), strict=True)]
        for name in calls
    }


def durations(
    times: Mapping[str, Sequence[float]], busy: float, wire: float
) -> dict[str, Any]:
    """The fields of a record for its times and lower bounds."""
    ms = {name: median(samples) for name, samples in times.items()}
    limit = max(busy, wire)
    quartiles = np.percentile(times["ours"], (25, 75))
    return {
        "collective_ms": 0.0,
        **{f"{name}_ms": round(value, 5) for name, value in ms.items()},
        "wire_ms": round(wire, 5),
        "limit_ms": round(limit, 5),
        "of_limit": round(limit / ms["ours"], 4),
        "speedup": round(ms["baseline"] / ms["ours"], 4),
        "ours_spread_ms": tuple(round(float(q), 5) for q in quartiles),
    }


def host_cost(device: Device, operation: Operation, call: Call) -> float:
    """Microseconds of the slowest rank's host for an eager call after the first."""
    call()
    rounds = []
    for _ in range(HOST_ROUNDS):
        operation.synchronize()
        device.world.barrier()
        started = time.perf_counter()
        for _ in range(HOST_CALLS):
            call()
        rounds.append((time.perf_counter() - started) / HOST_CALLS * 1e6)
    operation.synchronize()
    return round(max(cast(list[float], device.world.gather(median(rounds)))), 2)


def host_costs(gpu: Gpu, made: Workload, schedule: str) -> dict[str, float]:
    """`host_cost` of a small shape, by array library."""
    costs = {}
    for library, convert in gpu.libraries().items():
        case = made.converted(convert)
        with case.make(schedule) as operation:
            costs[library] = host_cost(gpu, operation, case.call(operation, 0))
    return costs


def benchmark(
    case: Workload, schedule: str, repeats: int
) -> tuple[dict[str, Any], list[str]]:
    """Check, then, on a GPU, time one shape: its part of a record, and its failures."""
    with case.make(schedule) as ours:
        values, references = check(case, ours)
        if isinstance(case.device, Gpu):
            values |= {**provenance(ours.program), "repeats": repeats}
            values |= compete(case.device, case, ours, references, repeats)
        shape = {"model": case.name, "dtype": case.dtype, **case.fields()}
        values = {**shape, "schedule": ours.program.plan.schedule, **values}
    return values, failures(values, case)


def failures(values: Mapping[str, Any], case: Workload) -> list[str]:
    """Failed checks, the same on all ranks."""
    allowed = {}
    for name in (name for name in values if name.endswith("error")):
        leeway = case.leeway if name == "error" else case.baseline_leeway
        allowed[name] = TOLERANCE[case.dtype] * leeway
    return wrong_results(values, allowed)


def wrong_results(values: Mapping[str, Any], allowed: Mapping[str, float]) -> list[str]:
    """What is wrong with errors and bits. allowed: the largest errors, by name."""
    found = []
    for name, most in allowed.items():
        if not values[name] <= most:  # also for NaN
            found.append(f"{name} {values[name]:.2e}, wanted {most:.1e}")
    if not values["bitwise_equal"]:
        found.append("the bits of three runs differ")
    return found


# ------------------------------------------------------------------- the command line


def parser_for(title: str, op: str) -> argparse.ArgumentParser:
    """The options of every benchmark that is recorded as `op`."""
    parser = argparse.ArgumentParser(description=title)
    add = parser.add_argument
    add("--record", type=Path, help=f"default: benchmarks/results/{op}.jsonl")
    add("--cpu", action="store_true", help="only check results, on the CPU backend")
    return parser


def shapes_parser(
    title: str, op: str, models: Mapping[str, Any]
) -> argparse.ArgumentParser:
    """The options of a benchmark of models."""
    parser = parser_for(title, op)
    add = parser.add_argument

    def names(text: str) -> list[str]:
        unknown = set(text.split(",")) - {*models, SMALL}
        if unknown:
            raise argparse.ArgumentTypeError(f"unknown models {sorted(unknown)}")
        return text.split(",")

    add("--models", type=names, help=f"some of {','.join((*models, SMALL))}")
    add("--rows-per-rank", "--tokens", "--batches", type=numbers, dest="rows")
    add("--schedule", choices=SCHEDULES, default="static")
    add("--repeats", type=int, default=REPEATS)
    return parser


def add_batch(parser: argparse.ArgumentParser) -> None:
    """The option that `Workload.has_batch` follows."""
    text = "also time deterministic='batch', in the same run"
    parser.add_argument("--batch", action="store_true", help=text)


def numbers(text: str) -> list[int]:
    """The type of an option: positive numbers separated by commas."""
    found = [int(number) for number in text.split(",")]
    if min(found) < 1:
        raise argparse.ArgumentTypeError(f"{min(found)} is not positive")
    return found


def begin(cpu: bool) -> Device:
    """Start the world, on the CPU backend if requested, and print it. Returns this
    rank's device. Collective."""
    backend = {"ETC_DIST_BACKEND": "cpu"} if cpu else {}
    world = etc_dist.start(Settings.load({**os.environ, **backend}))
    say(world, world.show())
    if world.backend == "cpu":
        say(world, "the CPU backend checks results and measures nothing")
    return open_device(world)


def say(world: World, text: str) -> None:
    """Print on rank 0."""
    if world.rank == 0:
        print(text, flush=True)


def provenance(program: Program) -> dict[str, Any]:
    """The fields of a record that follow from its program."""
    world, plan = program.world, program.plan
    return {
        "world_size": world.size,
        "backend": world.backend,
        "path": f"{plan.graph.name}, {plan.schedule} schedule, "
        f"{world.backend} backend, {program.workers} workers",
    }


def report(
    device: Device,
    path: Path | None,
    shared: Mapping[str, Any],
    values: Mapping[str, Any],
    wrong: Sequence[str],
) -> bool:
    """Print what was measured, and record it unless a check failed. Whether none did.
    shared: fields of all records of a command, among them `op`."""
    text = "".join(f"\n  FAILED: {each}" for each in wrong)
    say(device.world, f"{shared['op']} {described(values)}{text}")
    if not wrong:
        record(device, path, {**shared, **values})
    return not wrong


def record(device: Device, path: Path | None, values: Mapping[str, Any]) -> None:
    """Append a record on rank 0 of a GPU run."""
    if isinstance(device, Gpu) and device.world.rank == 0:
        records.append(values, path)


def main(
    device: Device,
    make: Make,
    models: Mapping[str, Sequence[int]],
    small: tuple[Sequence[int], int],
    rows: Sequence[int],
    options: argparse.Namespace,
) -> int:
    """Check and time each model with each number of rows; the exit code. The CPU
    backend checks the `small` sizes and rows."""
    sizes = {**models, SMALL: small[0]}
    chosen, counts = options.models or [*models], options.rows or rows
    shared: dict[str, Any] = {}
    if isinstance(device, Gpu):
        made = make(device, SMALL, *small)
        facts = device.facts()
        facts["baseline"] = made.libraries + facts["baseline"]
        shared = {"op": made.op, "protocol": made.protocol, **facts}
        shared["host_us"] = host_costs(device, made, options.schedule)
        say(device.world, f"{made.op}: host cost of a call {shared['host_us']} us")
    else:
        chosen, counts = options.models or [SMALL], options.rows or [small[1]]
    failed = False
    for name in chosen:
        for count in counts:
            case = make(device, name, sizes[name], count)
            case.has_batch = getattr(options, "batch", False)
            values, wrong = benchmark(case, options.schedule, options.repeats)
            failed |= not report(
                device, options.record, {"op": case.op, **shared}, values, wrong
            )
    device.world.close()
    return int(failed)


def described(values: Mapping[str, Any]) -> str:
    """A line of output: the shape, its checks and its times."""
    left = {"path", "world_size", "backend", "repeats", "ours_spread_ms", "model"}
    words = [str(values["model"])]
    for name, value in values.items():
        if name not in left:
            number = f"{value:.4g}" if isinstance(value, float) else value
            words.append(f"{name} {number}")
    return ", ".join(words)
