"""A workload: an operation at one shape, its reference and its rivals."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import cycle
from statistics import median
from typing import Any

import numpy as np

from benchmarks.device import WARM_UP, Call, Device, Gpu, captured_ours
from benchmarks.harness import SMALL, Run
from etc_dist import compile
from etc_dist.ir import GraphFunction
from etc_dist.ops.operation import Operation
from etc_dist.world import World

Calls = dict[str, Call]
"""Calls by the names of their times."""
TENSOR_PARALLEL = 8
"""The ranks that a model's layers are split over, for any number of measured ranks."""
MODELS: Mapping[str, tuple[int, int]] = {
    "llama3-8b": (4096, 14336),
    "qwen3-32b": (5120, 25600),
    "llama3-70b": (8192, 28672),
    "gpt3-175b": (12288, 49152),
    "llama3-405b": (16384, 53248),
}
"""Hidden and intermediate size."""
LINK_BYTES_PER_S = 340e9
"""The rate at which each of eight H200 sends to all others at once: the best measured
over NVLink (nominally 450 GB/s)."""
DTYPE = "bfloat16"
TOLERANCE: Mapping[str, float] = {"bfloat16": 3e-3, "float16": 5e-4}
"""Largest relative error; rounding each partial sum and the result costs 2.4e-3 in
bfloat16, an eighth of that in float16; the errors of small outputs vary."""
BLOCK = 7
PROTOCOL = (
    "host barrier, 2 ms device sleep, all-reduce in stream, event, call, event; max "
    f"over ranks; median after {WARM_UP} warm-ups; blocks of {BLOCK} take turns"
)
REPLAYED = (
    "2 ms device sleep, event, call, event; each call a replayed CUDA graph; median "
    f"after {WARM_UP} warm-ups; blocks of {BLOCK} take turns"
)


class GraphCall:
    """A compiled graph, called like an operation, with the tensors `names` in order;
    `dims` are those of all calls."""

    def __init__(
        self,
        graph: GraphFunction,
        world: World,
        names: Sequence[str],
        schedule: str = "auto",
    ):
        self.names, self.dims = names, dict[str, int]()
        self.program = compile(graph, world, schedule=schedule)
        self.synchronize, self.close = self.program.synchronize, self.program.close

    def __call__(self, *arrays: Any, stream: Any = None) -> None:
        array_by_name = dict(zip(self.names, arrays, strict=True))
        self.program.run(**array_by_name, dims=self.dims, stream=stream)

    def __enter__(self) -> GraphCall:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()


@dataclass(frozen=True)
class Rival:
    """Another implementation: a call for each input, the arrays that they fill, and our
    operations among its steps. fill: its inputs, before the calls that are checked, if
    calls overwrite them."""

    calls: Sequence[Call]
    outs: Sequence[Any]
    operations: tuple[Operation, ...] = ()
    fill: Call = lambda: None


class Workload(ABC):
    """An operation at one shape: this rank's inputs, weights and outputs, an fp32
    reference, and the calls to time on GPUs.

    Inputs follow from names, so a rank can draw those of all ranks. No reference needs
    a collective, which NCCL does not allow on ranks that share a GPU."""

    op: str
    protocol = PROTOCOL
    libraries = ""
    """Prefix of the libraries in a record."""
    inputs = 1
    """Inputs used in turn."""
    leeway, baseline_leeway = 1.0, 2.0
    """Times TOLERANCE: the allowed errors. The baseline rounds more often: NCCL adds in
    the arrays' dtype, and each step stores its result."""
    baselines: tuple[str, ...] = ("baseline",)
    """Rivals of which the fastest is the baseline."""
    is_cold = False
    """Whether other data is read before each timed call, instead of inputs in turn."""
    is_replayed = False
    """Whether our calls are timed as CUDA graphs."""
    spreads_nan = False
    """Whether NaNs in x reach all local memory of the operation."""
    has_batch = False
    """Whether `deterministic="batch"` is timed, too."""

    def __init__(
        self,
        device: Device,
        name: str,
        sizes: Sequence[int],
        rows: int,
        dtype: str = DTYPE,
        layout: str = "nk",
    ):
        """At a model's `sizes`, with `rows` of this rank. `layout`, if there is one
        weight: "nk" for w as it is, "kn" for a transposed view of [K, N]."""
        self.device, self.world, self.layout = device, device.world, layout
        self.name, self.sizes, self.rows, self.dtype = name, sizes, rows, dtype
        self.m, (self.n, self.k, *_) = rows * device.world.size, sizes
        self.made: dict[str, Any] = {}
        """Our operations that `make` has made, by the names of their times."""

    @abstractmethod
    def x(self, rank: int, number: int = 0) -> Any:
        """A rank's input."""

    @abstractmethod
    def make_weights(self) -> tuple[Any, ...]: ...

    @property
    @abstractmethod
    def out_shape(self) -> tuple[int, int]: ...

    @abstractmethod
    def make(self, schedule: str, **options: Any) -> Any:
        """The operation for this shape. Collective."""

    def arguments(self, number: int) -> tuple[Any, ...]:
        """Those of the operation for an input, without the result."""
        return (self.xs[number],)

    @abstractmethod
    def reference(self, number: int = 0) -> Any:
        """The result in fp32."""

    def results(self) -> list[Any]:
        """The results of the last runs, one for each input, as `reference` has them."""
        return self.outs

    baseline: Call
    """Of rivals that are one call."""

    @abstractmethod
    def rivals(self, gpu: Gpu) -> dict[str, Rival]:
        """Other ways to the same results, by the names of their times. Collective."""

    def parts(self, gpu: Gpu) -> Calls:
        """What is timed alone: the GEMMs ("gemm") and the collectives. Here, the
        baseline has only GEMMs."""
        return {"gemm": self.baseline}

    def durations(self, times: Mapping[str, Sequence[float]]) -> dict[str, Any]:
        """The fields of a record for the milliseconds of its repeats, by name."""
        busy, wire = self.limits(median(times["gemm"]))
        return {
            "collective_ms": 0.0,
            **medians(times),
            "wire_ms": round(wire, 5),
            **limited(times["ours"], max(busy, wire)),
            "speedup": round(median(times["baseline"]) / median(times["ours"]), 4),
        }

    @abstractmethod
    def limits(self, gemm_ms: float) -> tuple[float, float]:
        """Lower bounds in milliseconds: of the busiest chip and of its wire."""

    def fields(self) -> dict[str, Any]:
        """The shape as a record has it: M, N, K and more."""
        return {"M": self.m, "N": self.n, "K": self.k}

    @cached_property
    def xs(self) -> list[Any]:
        return [self.x(self.world.rank, number) for number in range(self.inputs)]

    @cached_property
    def weights(self) -> tuple[Any, ...]:
        return self.make_weights()

    @cached_property
    def outs(self) -> list[Any]:
        return self.new_outs()

    def new_outs(self) -> list[Any]:
        shape = self.out_shape
        return [self.device.empty(shape, self.dtype) for _ in range(self.inputs)]

    def calls(self, operation: Any, outs: Sequence[Any]) -> list[Call]:
        """Calls of the operation, one for each input."""
        return [
            partial(operation, *self.arguments(n), out) for n, out in enumerate(outs)
        ]

    def timed_calls(self, gpu: Gpu, calls: Sequence[Call]) -> list[Call]:
        """Calls of ours as they are timed."""
        if not self.is_replayed:
            return [*calls]
        for call in calls:
            call()  # a first call cannot be captured
        return [captured_ours(gpu, call) for call in calls]

    def timed(self, gpu: Gpu, ours: Operation, rivals: Mapping[str, Rival]) -> Calls:
        """The calls to time, by name."""
        own_calls = self.timed_calls(gpu, self.calls(ours, self.outs))
        rival_calls = {name: in_turn(rival.calls) for name, rival in rivals.items()}
        return {"ours": in_turn(own_calls), **rival_calls, **self.parts(gpu)}

    def batch_rival(self, gpu: Gpu) -> Rival:
        """The same bits for any number of rows, statically scheduled."""
        operation = self.make("static", deterministic="batch")
        self.made["batch"] = operation
        outs = self.new_outs()
        calls = self.timed_calls(gpu, self.calls(operation, outs))
        return Rival(calls, outs, (operation,))

    def spoil(self, operation: Operation, number: int) -> None:
        """Overwrites intermediate results with NaN, if `spreads_nan`. Collective."""
        if not self.spreads_nan:
            return
        # NOTE: the bits, since CuPy assigns no arrays of bfloat16.
        bits = self.xs[number].view(np.uint16)
        copy_of_bits = bits.copy()
        bits.fill(0xFFFF)
        self.calls(operation, self.outs)[number]()
        operation.synchronize()
        bits[...] = copy_of_bits

    def draw(self, name: str, rank: int, *shape: int) -> Any:
        """The same numbers on every rank that draws this name and rank."""
        full = f"{self.name} {name} of rank {rank}"
        return self.device.random(shape, self.dtype, full)

    def converted(self, convert: Callable[[Any], Any]) -> Workload:
        """The same arrays in another library."""
        workload = copy.copy(self)
        workload.xs, workload.outs = (
            [*map(convert, of)] for of in (self.xs, self.outs)
        )
        workload.weights = tuple(map(convert, self.weights))
        return workload


def medians(times: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The fields of a record for the milliseconds of repeats, by name."""
    return {f"{name}_ms": round(median(samples), 5) for name, samples in times.items()}


def limited(ours: Sequence[float], limit_ms: float) -> dict[str, Any]:
    """The fields of a record for the repeats of ours and their lower bound."""
    spread = (round(float(q), 5) for q in np.percentile(ours, (25, 75)))
    return {
        "limit_ms": round(limit_ms, 5),
        "of_limit": round(limit_ms / median(ours), 4),
        "ours_spread_ms": tuple(spread),
    }


def in_turn(calls: Sequence[Call]) -> Call:
    """One of the calls, the next one each time."""
    turns = cycle(calls)
    return lambda: next(turns)()


def run_steps(steps: Mapping[str, Call]) -> None:
    for step in steps.values():
        step()


Make = Callable[[Device, str, Any, int], Workload]
"""A workload of a device, a model's name and sizes, and the rows of a rank."""


@dataclass(frozen=True)
class Shapes:
    """The shapes that a subject measures by default."""

    models: Mapping[str, Sequence[int]]
    small: tuple[Sequence[int], int]
    """The sizes and rows of `SMALL`."""
    rows: Sequence[int]
    """Of a rank, for each model."""

    def of(self, run: Run) -> list[tuple[str, Sequence[int], int]]:
        """The model, its sizes and the rows of each shape. The CPU backend checks
        `small` by default."""
        options, is_on_gpu = run.options, isinstance(run.device, Gpu)
        models = options.models or (self.models if is_on_gpu else [SMALL])
        counts = options.rows or (self.rows if is_on_gpu else [self.small[1]])
        sizes = {**self.models, SMALL: self.small[0]}
        return [(name, sizes[name], rows) for name in models for rows in counts]
