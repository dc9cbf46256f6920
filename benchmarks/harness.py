"""The protocol: how a fused collective is checked and timed; see README.md."""

from __future__ import annotations

import argparse
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, cast

import numpy as np

import etc_dist
from benchmarks import records
from benchmarks.device import Call, Device, open_device
from etc_dist.ops.product import ProductOperation
from etc_dist.settings import Settings
from etc_dist.world import World

TENSOR_PARALLEL = 8
"""The ranks that a model's layers are split over, whatever the number measured on."""
MODELS: Mapping[str, tuple[int, int]] = {
    "llama3-8b": (4096, 14336),
    "qwen3-32b": (5120, 25600),
    "llama3-70b": (8192, 28672),
    "gpt3-175b": (12288, 49152),
    "llama3-405b": (16384, 53248),
}
"""Hidden and intermediate size."""
CPU_MODELS: Mapping[str, tuple[int, int]] = {"small": (512, 2048)}
LINK_BYTES_PER_S = 340e9
"""What leaves each of eight H200 at once, every rank writing to all others: the best
rate measured over NVLink (nominally 450 GB/s)."""
TOLERANCE: Mapping[str, float] = {"bfloat16": 3e-3, "float16": 5e-4}
"""Largest relative error; rounding each partial sum and the result costs 2.4e-3 in
bfloat16, an eighth of that in float16; small outputs scatter."""
REPEATS, WARM_UP, BLOCK = 21, 4, 7
HOST_CALLS, HOST_ROUNDS = 100, 5
PROTOCOL = (
    "host barrier, 2 ms device sleep, all-reduce in stream, event, call, event; max "
    f"over ranks; median after {WARM_UP} warm-ups; blocks of {BLOCK} take turns"
)


@dataclass(frozen=True)
class Shape:
    """Rows of one rank, columns of w and summed elements, on `world` ranks."""

    rows: int
    n: int
    k: int
    world: int

    @property
    def m(self) -> int:
        return self.rows * self.world


class Workload(ABC):
    """A fused collective: its shapes, and the unfused steps that give the same."""

    name: str
    operation: type[ProductOperation]

    @abstractmethod
    def sizes(self, hidden: int, intermediate: int) -> tuple[int, int]:
        """(N, K) of one rank of a model."""

    @abstractmethod
    def x_shape(self, shape: Shape) -> tuple[int, int]: ...

    @abstractmethod
    def out_shape(self, shape: Shape) -> tuple[int, int]: ...

    @abstractmethod
    def moved(self, shape: Shape) -> int:
        """Elements of the collective, of which a rank sends (W - 1) / W."""

    @abstractmethod
    def steps(
        self, device: Device, shape: Shape, x: Any, w: Any, out: Any
    ) -> dict[str, Call]:
        """ "gemm" and "collective", in the order in which they give `out`."""

    def wire_ms(self, shape: Shape) -> float:
        sent = self.moved(shape) * 2 * (shape.world - 1) / shape.world
        return sent / LINK_BYTES_PER_S * 1e3


@dataclass(frozen=True)
class Case:
    """Inputs and output of a workload at one shape; w is stored [n, k]."""

    workload: Workload
    shape: Shape
    dtype: str
    x: Any
    w: Any
    out: Any

    @classmethod
    def make(
        cls, device: Device, workload: Workload, shape: Shape, dtype: str, name: str
    ) -> Case:
        x_shape, w_shape = workload.x_shape(shape), (shape.n, shape.k)
        x = device.random(x_shape, dtype, f"{name} x")
        w = device.random(w_shape, dtype, f"{name} w")
        out = device.empty(workload.out_shape(shape), dtype)
        return cls(workload, shape, dtype, x, w, out)

    def with_w(self, w: Any) -> Case:
        """The same case with w as an operation of another layout takes it."""
        return replace(self, w=w)

    def unfused(self, device: Device, dtype: str | None) -> tuple[dict[str, Call], Any]:
        """The unfused steps in `dtype`, and the array that they fill."""
        x, w = device.convert(self.x, dtype), device.convert(self.w, dtype)
        out = device.empty(self.out.shape, dtype or self.dtype)
        device.poison(out)
        return self.workload.steps(device, self.shape, x, w, out), out

    def reference(self, device: Device) -> Any:
        """The result in fp32: the same matrix product and collective, unfused."""
        steps, out = self.unfused(device, "float32")
        run(steps)
        device.synchronize()
        return out


@dataclass(frozen=True)
class Times:
    """Milliseconds of each repeat, the slowest rank's."""

    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        return median(self.samples)

    @property
    def quartiles(self) -> tuple[float, float]:
        first, third = np.percentile(self.samples, (25, 75))
        return float(first), float(third)


def run(steps: Mapping[str, Call]) -> None:
    for step in steps.values():
        step()


def measure(
    device: Device, calls: Mapping[str, Call], repeats: int
) -> dict[str, Times]:
    """Time the calls in blocks that take turns, so that heat hits all alike."""
    for call in calls.values():
        for _ in range(WARM_UP):
            call()
    device.synchronize()
    mine: dict[str, list[float]] = {name: [] for name in calls}
    for done in range(0, repeats, BLOCK):
        for name, call in calls.items():
            for _ in range(min(BLOCK, repeats - done)):
                mine[name].append(device.time(call))
    every = cast(list[dict[str, list[float]]], device.world.gather(mine))
    return {
        name: Times(tuple(map(max, zip(*(rank[name] for rank in every), strict=True))))
        for name in calls
    }


def relative_error(device: Device, out: Any, reference: Any) -> float:
    """The relative Frobenius norm of out - reference, over all ranks; NaN if any is."""
    parts = device.world.gather(device.squares(out, reference))
    error, norm = np.sum(cast(list[tuple[float, float]], parts), axis=0)
    return float(np.sqrt(error / norm))


def bitwise_equal(device: Device, operation: ProductOperation, case: Case) -> bool:
    """Whether three runs give equal bits on all ranks; leaves the last in case.out.

    Before each run, the output and the operation's own symmetric memory are poisoned:
    what a run does not write or wait for shows as NaN."""
    operation(case.x, case.w, case.out)  # gives the operation memory of this size
    results = []
    for _ in range(3):
        operation.synchronize()
        device.poison(case.out)
        device.poison_staging(operation)
        device.synchronize()
        device.world.barrier()
        operation(case.x, case.w, case.out)
        results.append(case.out.copy())
    operation.synchronize()
    same = not any(bool(device.differs(results[0], other)) for other in results[1:])
    return all(cast(list[bool], device.world.gather(same)))


def host_cost(
    device: Device, operation: ProductOperation, workload: Workload
) -> dict[str, float]:
    """Microseconds of the host for an eager call after the first, by array library."""
    shape = Shape(256, 256, 256, device.world.size)
    case = Case.make(device, workload, shape, operation.dtype, "host cost")
    costs = {}
    for library, convert in device.libraries().items():
        x, w, out = map(convert, (case.x, case.w, case.out))
        operation(x, w, out)
        rounds = []
        for _ in range(HOST_ROUNDS):
            operation.synchronize()
            device.world.barrier()
            started = time.perf_counter()
            for _ in range(HOST_CALLS):
                operation(x, w, out)
            rounds.append((time.perf_counter() - started) / HOST_CALLS * 1e6)
        operation.synchronize()
        slowest = max(cast(list[float], device.world.gather(median(rounds))))
        costs[library] = round(slowest, 2)
    return costs


def benchmark(
    device: Device,
    operation: ProductOperation,
    workload: Workload,
    model: str,
    shape: Shape,
    repeats: int,
) -> dict[str, Any]:
    """Check, then time one shape: the part of a record that belongs to the shape."""
    case = Case.make(device, workload, shape, operation.dtype, model)
    equal = bitwise_equal(device, operation, case)
    reference = case.reference(device)
    error = relative_error(device, case.out, reference)
    steps, baseline_out = case.unfused(device, device.baseline_dtype)
    run(steps)
    device.synchronize()
    baseline_error = relative_error(device, baseline_out, reference)
    del reference
    calls: dict[str, Call] = {
        "ours": lambda: operation(case.x, case.w, case.out),
        "baseline": lambda: run(steps),
        **steps,
    }
    times = measure(device, calls, repeats)
    operation.synchronize()
    ours, baseline = times["ours"].median, times["baseline"].median
    gemm, wire = times["gemm"].median, workload.wire_ms(shape)
    return {
        "model": model,
        "M": shape.m,
        "N": shape.n,
        "K": shape.k,
        "dtype": operation.dtype,
        "ours_ms": round(ours, 5),
        "baseline_ms": round(baseline, 5),
        "gemm_ms": round(gemm, 5),
        "collective_ms": round(times["collective"].median, 5),
        "wire_ms": round(wire, 5),
        "limit_ms": round(max(gemm, wire), 5),
        "of_limit": round(max(gemm, wire) / ours, 4),
        "speedup": round(baseline / ours, 4),
        "error": error,
        "baseline_error": baseline_error,
        "bitwise_equal": equal,
        "repeats": repeats,
        "ours_spread_ms": tuple(round(q, 5) for q in times["ours"].quartiles),
    }


def faults(values: Mapping[str, Any]) -> list[str]:
    """What is wrong with a measured shape, in words; alike on all ranks."""
    found = []
    limit = TOLERANCE[values["dtype"]]
    # NCCL adds in the arrays' dtype: its error is larger, and grows with the ranks.
    for name, allowed in (("error", limit), ("baseline_error", 2 * limit)):
        if not values[name] <= allowed:  # so that NaN is refused too
            found.append(f"{name} {values[name]:.2e}, wanted {allowed:.0e}")
    if not values["bitwise_equal"]:
        found.append("three runs differ in their bits")
    return found


def provenance(world: World, operation: ProductOperation) -> dict[str, Any]:
    """What the records of a fused program share besides the device's facts."""
    program = operation.program
    schedule = program.plan.schedule
    workers = program.workers
    return {
        "world_size": world.size,
        "backend": world.backend,
        "path": f"{schedule} schedule, {world.backend} backend, {workers} workers",
    }


def start(cpu: bool) -> World:
    """The world of a benchmark, on the CPU backend if asked for."""
    backend = {"ETC_DIST_BACKEND": "cpu"} if cpu else {}
    environ = {**os.environ, **backend}
    return etc_dist.start(Settings.load(environ))


def teller(world: World) -> Callable[[str], None]:
    """Prints on rank 0."""
    return lambda text: print(text, flush=True) if world.rank == 0 else None


def may_record(world: World, path: Path | None) -> bool:
    """Rank 0 writes; on the CPU backend only where it was asked to."""
    return world.rank == 0 and (world.backend == "cuda" or path is not None)


def main(workload: Workload) -> int:
    """The command line of one workload's file; the exit code."""
    options = _parse(workload)
    world = start(options.cpu)
    tell = teller(world)
    known = MODELS if world.backend == "cuda" else CPU_MODELS
    rows = options.rows_per_rank or (1024 if world.backend == "cuda" else 64)
    names = options.models.split(",") if options.models else list(known)
    tell(world.show())
    if world.backend == "cpu":
        tell("the CPU backend is no performance path: its times mean nothing")
    device = open_device(world)
    operation = workload.operation(world=world)
    host_us = host_cost(device, operation, workload)
    shared: dict[str, Any] = {
        "op": workload.name,
        "schedule": operation.program.plan.schedule,
        "host_us": host_us,
        "protocol": PROTOCOL,
        **provenance(world, operation),
        **(device.facts() if world.rank == 0 else {}),
    }
    tell(f"{workload.name}: host cost of a call {host_us} us")
    failed = False
    for model in names:
        n, k = workload.sizes(*{**MODELS, **CPU_MODELS}[model])
        shape = Shape(rows, n, k, world.size)
        values = benchmark(device, operation, workload, model, shape, options.repeats)
        wrong = faults(values)
        failed = failed or bool(wrong)
        tell(_line(values) + "".join(f"\n  FAILED: {fault}" for fault in wrong))
        if not wrong and may_record(world, options.record):
            record = records.FusedRecord(
                **shared, **values, commit=records.commit(), date=records.now()
            )
            records.append(record, options.record)
    operation.close()
    world.close()
    return int(failed)


def _parse(workload: Workload) -> argparse.Namespace:
    models = {**MODELS, **CPU_MODELS}
    parser = argparse.ArgumentParser(description=f"Time {workload.name}.")
    add = parser.add_argument
    add("--models", help=f"some of {','.join(models)}, with commas between")
    add("--rows-per-rank", type=int, help="1024, or 64 on the CPU backend")
    add("--repeats", type=int, default=REPEATS)
    add("--record", type=Path, help="default: benchmarks/results/<op>.jsonl")
    add("--cpu", action="store_true", help="the CPU backend: no performance path")
    options = parser.parse_args()
    unknown = set((options.models or "").split(",")) - {*models, ""}
    if unknown:
        parser.error(f"unknown models {', '.join(sorted(unknown))}")
    return options


def _line(values: Mapping[str, Any]) -> str:
    return (
        "{model:12s} M {M} N {N} K {K}: gemm {gemm_ms:.3f} collective "
        "{collective_ms:.3f} wire {wire_ms:.3f} baseline {baseline_ms:.3f} ours "
        "{ours_ms:.3f} ms, speed-up {speedup:.2f}, of limit {of_limit:.2f}, error "
        "{error:.2e} (baseline {baseline_error:.2e}), equal bits {bitwise_equal}"
    ).format(**values)
