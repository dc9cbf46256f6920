"""Matrix multiplication by float8 weights with a scale for each block of 128 x 128, on
one GPU. The baseline is ours by the same weights in 16 bits, which are rounded to them.

As the subject `matmul` otherwise: replayed CUDA graphs, and weights that take turns."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from benchmarks.device import DTYPES, Gpu, dequantized, roofline_ms, wide
from benchmarks.harness import Result, Run, Subject, add_batch, add_shapes
from benchmarks.protocol import measure_shapes
from benchmarks.subjects.matmul import SHAPES as PLAIN
from benchmarks.subjects.matmul import MatmulWorkload, taking_turns
from benchmarks.workload import DTYPE, Rival, Workload, in_turn
from etc_dist import ScaledWeight
from etc_dist.functions.scaled_weights import BLOCK, E4M3, PER_BLOCK, Scaling
from etc_dist.ir.tensor import numpy_dtype
from etc_dist.ops.argument_table import DTYPES as ELEMENTS

SHAPES = replace(PLAIN, small=((264, 144), 20))
W_LAYOUT = Scaling(PER_BLOCK, "float32").w_layout


class Float8Workload(MatmulWorkload):
    """x [M, K] and a weight [N, K] of float8 -> [M, N]."""

    op = "matmul_float8"
    baseline_leeway = 2.0  # its weights are rounded, too

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        if isinstance(self.device, Gpu):
            self.inputs = taking_turns(self.n * self.k)

    def make_weights(self) -> tuple[Any, ...]:
        return tuple(map(self._weight, range(self.inputs)))

    def _weight(self, number: int) -> ScaledWeight:
        """Codes of all numbers, about equally often, and scales of both signs."""
        name = f"{self.name} w {number}"
        codes = self.device.random_codes((self.n, self.k), name)
        blocks = -(-self.n // BLOCK), -(-self.k // BLOCK)
        scales = self.device.random(blocks, "float32", f"{name} scales")
        is_gpu = isinstance(self.device, Gpu)
        return ScaledWeight(codes if is_gpu else codes.view(numpy_dtype(E4M3)), scales)

    def _dense(self, number: int) -> Any:
        """The weight in fp32."""
        return dequantized(self.device.xp, *self.weights[number])

    def reference(self, number: int = 0) -> Any:
        return wide(self.xs[number]) @ self._dense(number).T

    def rivals(self, gpu: Gpu) -> dict[str, Rival]:
        operation, outs = self.make("static"), self.new_outs()
        calls = [
            partial(operation, x, self._dense(n).astype(DTYPES[self.dtype]), out)
            for n, (x, out) in enumerate(zip(self.xs, outs, strict=True))
        ]
        timed = self.timed_calls(gpu, calls)
        self.baseline = in_turn(timed)
        return {"baseline": Rival(timed, outs, (operation,))}

    def limits(self, gemm_ms: float) -> tuple[float, float]:
        assert isinstance(self.device, Gpu)
        moved = self.n * self.k + 2 * self.rows * (self.n + self.k)
        flops = 2 * self.rows * self.n * self.k
        return roofline_ms(moved, flops, self.device.rates), 0.0

    def fields(self) -> dict[str, Any]:
        return {**Workload.fields(self), "w_layout": W_LAYOUT}

    def converted(self, convert: Callable[[Any], Any]) -> Workload:
        weights, self.weights = self.weights, ()
        other = super().converted(convert)
        self.weights = weights
        other.weights = tuple(ScaledWeight(*map(convert, w)) for w in weights)
        return other


def measure(run: Run) -> Iterator[Result]:
    return measure_shapes(run, partial(Float8Workload, dtype=run.options.dtype), SHAPES)


def add_options(parser: ArgumentParser) -> None:
    add_shapes(parser, SHAPES.models)
    parser.add_argument("--dtype", choices=ELEMENTS, default=DTYPE)
    add_batch(parser)


SUBJECTS = {
    "matmul_float8": Subject(
        "Check and time a multiplication by float8 weights.", measure, add_options
    )
}
