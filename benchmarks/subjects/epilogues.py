"""Matrix multiplications with the epilogues of examples/, against the plain store.

Both run on the tiles that are chosen for the plain store.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from argparse import ArgumentParser
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import product
from statistics import median
from typing import Any

import numpy as np

from benchmarks.device import Call, Device, Gpu, captured_ours, wide
from benchmarks.harness import REPEATS, Result, Run, Subject, numbers, provenance
from benchmarks.protocol import measure_times, medians, wrong_results
from benchmarks.subjects.matmul import PROTOCOL, taking_turns
from benchmarks.workload import DTYPE, in_turn
from etc_dist import compile
from etc_dist.functions.tile_matmul import TileShape
from etc_dist.ir import GraphFunction
from etc_dist.ops.matmul import matmul_graph
from etc_dist.ops.matmul_policy import SHAPES, choose
from etc_dist.ops.tuning import tuning_of
from etc_dist.program import Program
from examples import matmul_bias_gelu, matmul_fp8

SIZES = 5120, 25600
"""N and K."""
SMALL, SMALL_ROWS = (272, 136), [20]
ROWS = [64, 4096]
Arrays = Mapping[str, Any]


class Example(ABC):
    """The program of an example on one tile shape, at one size."""

    name: str
    largest_error: float
    """Relative Frobenius norm: that of rounding y."""

    def __init__(self, device: Device, shape: TileShape, m: int, n: int):
        self.device, self.shape, self.m, self.n = device, shape, m, n

    dims: Mapping[str, int] = {}

    @abstractmethod
    def graph(self) -> GraphFunction: ...

    @abstractmethod
    def arrays(self) -> dict[str, Any]:
        """All but x and w."""

    @abstractmethod
    def found(self, arrays: Arrays) -> Any:
        """The result of a run in fp32."""

    @abstractmethod
    def expected(self, arrays: Arrays, product: Any) -> Any:
        """The same by x @ w.T in fp32."""


class BiasGelu(Example):
    name, largest_error = "bias + gelu", 3e-3
    dims: Mapping[str, int] = {"shape": 0}

    def graph(self) -> GraphFunction:
        return matmul_bias_gelu.matmul_bias_gelu(1, shapes=[self.shape])

    def arrays(self) -> dict[str, Any]:
        bias = self.device.random((self.n,), DTYPE, "bias")
        return {"bias": bias, "y": self.device.empty((self.m, self.n), DTYPE)}

    def found(self, arrays: Arrays) -> Any:
        return wide(arrays["y"])

    def expected(self, arrays: Arrays, product: Any) -> Any:
        v = product + wide(arrays["bias"])
        return v / 2 * (1 + self.device.xp.tanh(0.7978845608 * (v + 0.044715 * v**3)))


class Fp8(Example):
    name, largest_error = "fp8, scales", 0.04

    def graph(self) -> GraphFunction:
        return matmul_fp8.matmul_fp8(1, shape=self.shape)

    def arrays(self) -> dict[str, Any]:
        strips = -(-self.n // self.shape.strip_columns(False))
        y = self.device.xp.empty((self.m, self.n), np.uint8)
        return {"y": y, "scales": self.device.empty((strips, self.m), "float32")}

    def found(self, arrays: Arrays) -> Any:
        # NOTE: by a table, since CuPy has no float8.
        values = np.arange(256, dtype=np.uint8).view(matmul_fp8.FP8)
        width = self.shape.strip_columns(False)
        scales = arrays["scales"].T.repeat(width, axis=1)[:, : self.n]
        numbers_of = self.device.xp.asarray(values.astype(np.float32))
        return numbers_of[arrays["y"].astype(np.int32)] * scales

    def expected(self, arrays: Arrays, product: Any) -> Any:
        return product


EXAMPLES: Sequence[type[Example]] = (BiasGelu, Fp8)


def check(example: Example, program: Program, arrays: Arrays) -> dict[str, Any]:
    """The error of a run, and whether three give equal bits; before each one the
    outputs are filled with NaN."""
    outputs = [arrays[tensor.name] for tensor in program.plan.graph.outputs()]
    runs = []
    for _ in range(3):
        for output in outputs:
            example.device.poison(output)
        program.run(**arrays, dims=example.dims)
        program.synchronize()
        runs.append([output.view(np.uint8).copy() for output in outputs])
    equal = (
        bool((a == b).all())
        for run in runs[1:]
        for a, b in zip(runs[0], run, strict=True)
    )
    expected = example.expected(arrays, wide(arrays["x"]) @ wide(arrays["w"]).T)
    error = example.device.relative_error([example.found(arrays)], [expected])
    return {"error": error, "bitwise_equal": all(equal)}


def replayed(
    gpu: Gpu, program: Program, dims: Mapping[str, int], each: Sequence[Arrays]
) -> Call:
    """A CUDA graph for each set of arrays, in turn."""
    calls = [partial(program.run, **arrays, dims=dims) for arrays in each]
    for call in calls:
        call()  # a first call cannot be captured
    return in_turn([captured_ours(gpu, call) for call in calls])


def benchmark(
    device: Device, kind: type[Example], sizes: tuple[int, int], m: int, repeats: int
) -> Result:
    """Check, then, on a GPU, time one size of an example."""
    world, (n, k) = device.world, sizes
    count = taking_turns(n, k) if isinstance(device, Gpu) else 1
    x = device.random((m, k), DTYPE, "x")
    weights = [device.random((n, k), DTYPE, f"w {i}", k**-0.5) for i in range(count)]
    y = device.empty((m, n), DTYPE)
    with ExitStack() as stack:
        plain = stack.enter_context(compile(matmul_graph(world.size), world))
        number = choose(m, n, k, plain.workers, tuning=tuning_of(world))
        example = kind(device, SHAPES[number], m, n)
        program = stack.enter_context(compile(example.graph(), world))
        own = example.arrays()
        given = [{"x": x, "w": w, **own} for w in weights]
        values: dict[str, Any] = {"model": example.name, "M": m, "N": n, "K": k}
        values |= {"dtype": DTYPE, "policy": str(example.shape)}
        values |= {"schedule": program.plan.schedule}
        values |= check(example, program, given[0])
        if isinstance(device, Gpu):
            stored = [{"x": x, "w": w, "y": y} for w in weights]
            calls = {
                "ours": replayed(device, program, example.dims, given),
                "store": replayed(device, plain, {"shape": number}, stored),
            }
            times = measure_times(device, calls, repeats)
            of_store = median(times["ours"]) / median(times["store"])
            values |= {**medians(times), "of_store": round(of_store, 4)}
            values |= {"repeats": repeats, **provenance(program)}
    return values, wrong_results(values, {"error": example.largest_error})


def measure(run: Run) -> Iterator[Result]:
    run.shared["protocol"] = PROTOCOL
    sizes, rows = (SIZES, ROWS) if isinstance(run.device, Gpu) else (SMALL, SMALL_ROWS)
    for kind, m in product(EXAMPLES, run.options.rows or rows):
        yield benchmark(run.device, kind, sizes, m, run.options.repeats)


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--rows", type=numbers)
    parser.add_argument("--repeats", type=int, default=REPEATS)


TITLE = "Check and time the epilogues of the examples."
SUBJECT = Subject(TITLE, measure, add_options, op="epilogue")
