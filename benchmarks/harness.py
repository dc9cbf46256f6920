"""The protocol: how a fused operation is checked and timed; see README.md."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import product, starmap
from statistics import median
from typing import Any, cast

import numpy as np

from benchmarks.command import (
    begin,
    numbers,
    parser_for,
    provenance,
    record_all,
    teller,
)
from benchmarks.device import Call, Device
from etc_dist.ops.operation import Operation
from etc_dist.ops.product import ProductOperation
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
DTYPE = "bfloat16"
WARM_UP, BLOCK = 4, 7
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


@dataclass(frozen=True)
class Chain:
    """Operations, and what lies between them, called in a row to fill `out`."""

    operations: tuple[Operation, ...]
    call: Call
    out: Any


class Workload(ABC):
    """A fused operation: its shapes, and the unfused steps that give the same."""

    name: str
    operation: type[ProductOperation]
    """What `make` makes, where weights are arguments of the call."""
    parts: Mapping[str, tuple[str, ...]] = {
        "gemm": ("gemm",),
        "collective": ("collective",),
    }
    """What is timed alone: the steps of the matrix products, and of the collectives."""
    leeway: float = 1.0
    """Times TOLERANCE: the error allowed."""

    @abstractmethod
    def sizes(self, hidden: int, intermediate: int) -> tuple[int, int]:
        """(N, K) of one rank of a model."""

    @abstractmethod
    def x_shape(self, shape: Shape) -> tuple[int, int]: ...

    def weight_shapes(self, shape: Shape) -> tuple[tuple[int, int], ...]:
        return ((shape.n, shape.k),)

    @abstractmethod
    def out_shape(self, shape: Shape) -> tuple[int, int]: ...

    @abstractmethod
    def moved(self, shape: Shape) -> int:
        """Elements of the collectives, of which a rank sends (W - 1) / W."""

    steps: Callable[..., dict[str, Call]]
    """steps(device, shape, x, *weights, out): the unfused steps by name, in the order
    in which they give `out`; `parts` has those that are timed alone."""

    def make(self, world: World, case: Case, schedule: str) -> Operation:
        """The fused operation for this case. Collective."""
        return self.operation(dtype=case.dtype, world=world, schedule=schedule)

    def call(self, operation: Any, case: Case) -> Call:
        """One run of the operation on the arrays of a case."""
        return partial(operation, case.x, *case.weights, case.out)

    def rivals(self, device: Device, case: Case) -> dict[str, Chain]:
        """Other ways of ours to the same result, timed beside, by the name that their
        time and error have in the record. Collective."""
        return {}

    def wire_ms(self, shape: Shape) -> float:
        sent = self.moved(shape) * 2 * (shape.world - 1) / shape.world
        return sent / LINK_BYTES_PER_S * 1e3


@dataclass(frozen=True)
class Case:
    """Inputs and output of a workload at one shape; weights are stored [n, k]."""

    workload: Workload
    shape: Shape
    dtype: str
    x: Any
    weights: tuple[Any, ...]
    out: Any

    @classmethod
    def make(
        cls, device: Device, workload: Workload, shape: Shape, dtype: str, name: str
    ) -> Case:
        x = device.random(workload.x_shape(shape), dtype, f"{name} x")
        weights = tuple(
            device.random(extents, dtype, f"{name} w{number or ''}")
            for number, extents in enumerate(workload.weight_shapes(shape))
        )
        out = device.empty(workload.out_shape(shape), dtype)
        return cls(workload, shape, dtype, x, weights, out)

    @property
    def w(self) -> Any:
        """The weight of a workload that has one."""
        (w,) = self.weights
        return w

    def with_w(self, w: Any) -> Case:
        """The same case with w as an operation of another layout takes it."""
        return replace(self, weights=(w,))

    def converted(self, convert: Callable[[Any], Any]) -> Case:
        """The same case with the arrays of another library."""
        weights = tuple(map(convert, self.weights))
        return replace(self, x=convert(self.x), weights=weights, out=convert(self.out))

    def unfused(self, device: Device, dtype: str | None) -> tuple[dict[str, Call], Any]:
        """The unfused steps in `dtype`, and the array that they fill."""
        x, *weights = (device.convert(a, dtype) for a in (self.x, *self.weights))
        out = device.empty(self.out.shape, dtype or self.dtype)
        device.poison(out)
        return self.workload.steps(device, self.shape, x, *weights, out), out

    def reference(self, device: Device) -> Any:
        """The result in fp32: the same products and collectives, unfused."""
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
    return relative_norm(device.world, device.squares(out, reference))


def relative_norm(world: World, squares: tuple[float, float]) -> float:
    """The relative error from each rank's (squared error, squared norm)."""
    parts = cast(list[tuple[float, float]], world.gather(squares))
    error, norm = np.sum(parts, axis=0)
    return float(np.sqrt(error / norm))


def bitwise_equal(device: Device, operation: Operation, call: Call, out: Any) -> bool:
    """Whether three runs of a call give equal bits on all ranks; leaves the last in
    `out`, which the call fills.

    Before each run, the output and the operation's own symmetric memory are poisoned:
    what a run does not write or wait for shows as NaN."""
    call()  # gives the operation memory of this size
    operation.synchronize()
    results = []
    for _ in range(3):
        device.poison(out)
        device.poison_staging(operation)
        device.synchronize()
        device.world.barrier()
        call()
        operation.synchronize()
        results.append(out.copy())
    same = not any(bool(device.differs(results[0], other)) for other in results[1:])
    return all(cast(list[bool], device.world.gather(same)))


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


def host_costs(device: Device, workload: Workload, schedule: str) -> dict[str, float]:
    """`host_cost` of a small shape, by array library."""
    shape = Shape(256, 256, 256, device.world.size)
    made = Case.make(device, workload, shape, DTYPE, "host cost")
    costs = {}
    for library, convert in device.libraries().items():
        case = made.converted(convert)
        operation = workload.make(device.world, case, schedule)
        costs[library] = host_cost(device, operation, workload.call(operation, case))
        operation.close()
    return costs


def benchmark(
    device: Device,
    workload: Workload,
    model: str,
    shape: Shape,
    repeats: int,
    schedule: str,
) -> dict[str, Any]:
    """Check, then time one shape: the part of a record that belongs to the shape."""
    case = Case.make(device, workload, shape, DTYPE, model)
    operation = workload.make(device.world, case, schedule)
    rivals = workload.rivals(device, case)
    steps, baseline_out = case.unfused(device, device.baseline_dtype)
    calls: dict[str, Call] = {
        "ours": workload.call(operation, case),
        "baseline": partial(run, steps),
        **{
            part: partial(run, {name: steps[name] for name in names})
            for part, names in workload.parts.items()
        },
        **{name: chain.call for name, chain in rivals.items()},
    }
    equal = bitwise_equal(device, operation, calls["ours"], case.out)
    for name in ("baseline", *rivals):
        calls[name]()
    device.synchronize()
    outs = {"error": case.out, "baseline_error": baseline_out}
    outs |= {f"{name}_error": chain.out for name, chain in rivals.items()}
    reference = case.reference(device)
    errors = {name: relative_error(device, o, reference) for name, o in outs.items()}
    del reference
    times = measure(device, calls, repeats)
    values = {
        "model": model,
        "M": shape.m,
        "N": shape.n,
        "K": shape.k,
        "dtype": case.dtype,
        "schedule": operation.program.plan.schedule,
        **provenance(operation.program),
        **durations(times, times["gemm"].median, workload.wire_ms(shape)),
        **errors,
        "bitwise_equal": equal,
        "repeats": repeats,
    }
    chained = (made for chain in rivals.values() for made in chain.operations)
    for made in (operation, *chained):
        made.synchronize()
        made.close()
    return values


def durations(times: Mapping[str, Times], busy: float, wire: float) -> dict[str, Any]:
    """What a record says of the times of its calls: none can take less than its chip
    is `busy`, nor than its `wire` is."""
    ms = {name: each.median for name, each in times.items()}
    limit = max(busy, wire)
    return {
        **{f"{name}_ms": round(median, 5) for name, median in ms.items()},
        "wire_ms": round(wire, 5),
        "limit_ms": round(limit, 5),
        "of_limit": round(limit / ms["ours"], 4),
        "speedup": round(ms["baseline"] / ms["ours"], 4),
        "ours_spread_ms": tuple(round(q, 5) for q in times["ours"].quartiles),
    }


def faults(values: Mapping[str, Any], ours: float, others: float) -> list[str]:
    """What is wrong with a measured shape, in words; alike on all ranks. Times
    TOLERANCE, our error may be `ours`, and any other one `others`."""
    found = []
    for name in (name for name in values if name.endswith("error")):
        allowed = TOLERANCE[values["dtype"]] * (ours if name == "error" else others)
        if not values[name] <= allowed:  # so that NaN is refused too
            found.append(f"{name} {values[name]:.2e}, wanted {allowed:.1e}")
    if not values["bitwise_equal"]:
        found.append("three runs differ in their bits")
    return found


def main(workload: Workload) -> int:
    """The command line of one workload's file; the exit code."""
    parser = parser_for(workload.name, {**MODELS, **CPU_MODELS})
    text = "numbers, with commas between; default: 1024, or 64 on the CPU backend"
    parser.add_argument("--rows-per-rank", type=numbers, help=text)
    options = parser.parse_args()
    device = begin(options.cpu)
    world = device.world
    known = MODELS if world.backend == "cuda" else CPU_MODELS
    rows = options.rows_per_rank or [1024 if world.backend == "cuda" else 64]
    host_us = host_costs(device, workload, options.schedule)
    teller(world)(f"{workload.name}: host cost of a call {host_us} us")
    shared: dict[str, Any] = {
        "op": workload.name,
        "host_us": host_us,
        "protocol": PROTOCOL,
        **(device.facts() if world.rank == 0 else {}),
    }

    def measured(model: str, rows: int) -> dict[str, Any]:
        n, k = workload.sizes(*{**MODELS, **CPU_MODELS}[model])
        shape = Shape(rows, n, k, world.size)
        how = options.repeats, options.schedule
        return benchmark(device, workload, model, shape, *how)

    # What rounds more often may be further off: NCCL adds in the arrays' dtype, and
    # steps in a row store what lies between them.
    allowed = partial(faults, ours=workload.leeway, others=2 * workload.leeway)
    shapes = starmap(measured, product(options.models or known, rows))
    return record_all(world, options.record, shared, shapes, allowed, _line)


def _line(values: Mapping[str, Any]) -> str:
    times = ", ".join(
        f"{name.removesuffix('_ms')} {value:.3f}"
        for name, value in values.items()
        if name.endswith("_ms") and name != "ours_spread_ms"
    )
    return (
        "{model:12s} M {M} N {N} K {K}: {times} ms; speed-up {speedup:.2f}, of limit "
        "{of_limit:.2f}, error {error:.2e} (baseline {baseline_error:.2e}), equal bits "
        "{bitwise_equal}"
    ).format(times=times, **values)
