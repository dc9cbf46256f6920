"""Matrix multiplications with the epilogues of examples/, against the plain store.

Both run on the same tiles: of those with all columns of their shape and all of k, the
fastest ones by the model."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from statistics import median
from typing import Any

import numpy as np

from benchmarks.device import Gpu, wide
from benchmarks.harness import REPEATS, Result, Run, Subject, numbers
from benchmarks.protocol import benchmark
from benchmarks.subjects.matmul import PROTOCOL, MatmulWorkload
from benchmarks.workload import (
    DTYPE,
    TOLERANCE,
    Calls,
    GraphCall,
    Rival,
    Workload,
    in_turn,
    medians,
)
from etc_dist.ir import GraphFunction
from etc_dist.ops.matmul import matmul_graph
from etc_dist.ops.tile_model import FAMILY, dims_of, predictions
from etc_dist.ops.tuning import tuning_of
from examples import matmul_bias_gelu, matmul_fp8

SIZES, ROWS = (5120, 25600), [64, 4096]
"""N and K."""
SMALL, SMALL_ROWS = (272, 136), [20]


class Epilogue(MatmulWorkload):
    """The program of an example, and that of a plain store, on one tile shape."""

    op = "epilogue"
    baselines = ()

    @property
    def dims(self) -> Mapping[str, int]:
        """The dims of the example that its arrays do not have."""
        return {}

    def graph(self) -> GraphFunction:
        """The example's, on `self.shape`."""
        raise NotImplementedError

    def more(self) -> dict[str, Any]:
        """The tensors of an input but x, w and y."""
        raise NotImplementedError

    def make_weights(self) -> tuple[Any, ...]:
        (n, k), device = self.sizes, self.device
        names = [f"w {i}" for i in range(self.inputs)]
        return tuple(device.random((n, k), self.dtype, w, k**-0.5) for w in names)

    def make(self, schedule: str, **options: Any) -> GraphCall:
        self.plain = GraphCall(matmul_graph(1), self.world, ("x", "w", "y"))
        workers, tuning = self.plain.program.workers, tuning_of(self.world)
        sizes = self.rows, self.n, self.k
        tiling = next(
            prediction.tiling
            for prediction in predictions(FAMILY, sizes, workers, tuning.tiles)
            if prediction.tiling.parts == 1
            and prediction.tiling.columns == FAMILY[prediction.tiling.shape_idx].columns
        )
        self.plain.dims, self.shape = dims_of(tiling), FAMILY[tiling.shape_idx]
        self.tensors = [self.more() for _ in range(self.inputs)]
        names = "x", "w", *self.tensors[0], "y"
        call = GraphCall(self.graph(), self.world, names)
        call.dims = dict(self.dims)
        return call

    def arguments(self, number: int) -> tuple[Any, ...]:
        return *super().arguments(number), *self.tensors[number].values()

    def rivals(self, gpu: Gpu) -> dict[str, Rival]:
        return {}

    def parts(self, gpu: Gpu) -> Calls:
        """The plain store."""
        outs = [gpu.empty(self.out_shape, self.dtype) for _ in self.outs]
        operands = zip(self.xs, self.weights, outs, strict=True)
        calls = self.timed_calls(gpu, [partial(self.plain, *some) for some in operands])
        return {"store": in_turn(calls)}

    def durations(self, times: Mapping[str, Sequence[float]]) -> dict[str, Any]:
        of_store = median(times["ours"]) / median(times["store"])
        return {**medians(times), "of_store": round(of_store, 4)}

    def fields(self) -> dict[str, Any]:
        return {**Workload.fields(self), "policy": str(self.shape)}


class BiasGelu(Epilogue):
    @property
    def dims(self) -> Mapping[str, int]:
        return {"shape": 0, "column_groups": self.shape.columns // 8}

    def graph(self) -> GraphFunction:
        return matmul_bias_gelu.matmul_bias_gelu(1, shapes=[self.shape])

    def more(self) -> dict[str, Any]:
        return {"bias": self.device.random((self.n,), self.dtype, "bias")}

    def reference(self, number: int = 0) -> Any:
        v = super().reference(number) + wide(self.tensors[number]["bias"])
        return v / 2 * (1 + self.device.xp.tanh(0.7978845608 * (v + 0.044715 * v**3)))


class Fp8(Epilogue):
    leeway = 0.04 / TOLERANCE[DTYPE]
    """Half of the distance between two numbers."""

    def graph(self) -> GraphFunction:
        return matmul_fp8.matmul_fp8(1, shape=self.shape)

    def more(self) -> dict[str, Any]:
        num_strips = -(-self.n // self.shape.strip_columns(False))
        return {"scales": self.device.empty((num_strips, self.rows), "float32")}

    def new_outs(self) -> list[Any]:
        shape = self.out_shape
        return [self.device.xp.empty(shape, np.uint8) for _ in range(self.inputs)]

    def spoil(self, operation: Any, number: int) -> None:
        self.device.poison(self.tensors[number]["scales"])

    def results(self) -> list[Any]:
        # NOTE: by a table, since CuPy has no float8.
        values = np.arange(256, dtype=np.uint8).view(matmul_fp8.FP8)
        table = self.device.xp.asarray(values.astype(np.float32))
        width = self.shape.strip_columns(False)
        return [
            table[y.astype(np.int32)]
            * more["scales"].T.repeat(width, axis=1)[:, : self.n]
            for y, more in zip(self.outs, self.tensors, strict=True)
        ]


EXAMPLES = {"bias + gelu": BiasGelu, "fp8, scales": Fp8}


def measure(run: Run) -> Iterator[Result]:
    run.shared["protocol"] = PROTOCOL
    sizes, rows = (SIZES, ROWS) if isinstance(run.device, Gpu) else (SMALL, SMALL_ROWS)
    for (name, kind), m in product(EXAMPLES.items(), run.options.rows or rows):
        case = kind(run.device, name, sizes, m)
        yield benchmark(case, "auto", run.options.repeats)
        case.plain.close()


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--rows", type=numbers)
    parser.add_argument("--repeats", type=int, default=REPEATS)


TITLE = "Check and time the epilogues of the examples."
SUBJECTS = {"epilogues": Subject(TITLE, measure, add_options, op="epilogue")}
