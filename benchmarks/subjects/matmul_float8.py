"""Matrix multiplication by float8 weights with a scale for each block of 128 x 128, on
one GPU. The baseline is ours by the same weights in 16 bits, which are rounded to them.

With --activations float8, x is quantized in the call, also by the further rival
"scaled_mm": torch's scaled product of the same blocks, after a quantization that
torch.compile makes for the sizes. The reference is that of x dequantized, and the
records are those of `matmul_float8_activations`.

Without --models and --rows, sizes are drawn from the commit: M from 1 to 64, or from
1,024 to 8,192 with float8 activations. A gate that is not met is then recorded as a
failure of the run. As the subject `matmul` otherwise: replayed CUDA graphs, and inputs
that take turns."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import numpy as np

from benchmarks.device import (
    DTYPES,
    Call,
    Device,
    Gpu,
    captured,
    dequantized,
    roofline_ms,
    wide,
)
from benchmarks.harness import Result, Run, Subject, add_batch, add_shapes
from benchmarks.protocol import measure_shapes
from benchmarks.random_sizes import SIZES, draws, seed_of
from benchmarks.records import Record, commit
from benchmarks.subjects.matmul import SHAPES as PLAIN
from benchmarks.subjects.matmul import MatmulWorkload, taking_turns
from benchmarks.subjects.random_sizes import check_gates, refusal
from benchmarks.workload import DTYPE, Rival, Shapes, Workload, in_turn
from etc_dist import Matmul, ScaledWeight
from etc_dist.functions.quantize_rows import LEAST
from etc_dist.functions.scaled_weights import (
    BLOCK,
    E4M3,
    MOST_E4M3,
    PER_BLOCK,
    Scaling,
)
from etc_dist.ir.tensor import numpy_dtype
from etc_dist.ops.argument_table import DTYPES as ELEMENTS
from etc_dist.ops.scaled_weight import ACTIVATIONS, FLOAT8

SHAPES = replace(PLAIN, small=((264, 144), 20))
SCALING = Scaling(PER_BLOCK, "float32")
ALIGNED = 4
"""cuBLAS has rows of x, and scales of a row of w, in multiples of this."""


def scaled_weight(
    device: Device, name: str, shape: Sequence[int], deviation: float = 0.1
) -> ScaledWeight:
    """Codes [..., n, k] of all numbers, about equally often, and scales of both signs
    for blocks. deviation: of the scales."""
    *stack, n, k = shape
    codes = device.random_codes((prod(stack) * n, k), name).reshape(shape)
    blocks = *stack, -(-n // BLOCK), -(-k // BLOCK)
    scales = device.random(blocks, "float32", f"{name} scales", deviation)
    is_gpu = isinstance(device, Gpu)
    return ScaledWeight(codes if is_gpu else codes.view(numpy_dtype(E4M3)), scales)


class Float8Workload(MatmulWorkload):
    """x [M, K] and a weight [N, K] of float8 -> [M, N]."""

    op = "matmul_float8"
    libraries = "our matmul in 16 bits; "
    baseline_leeway = 2.0  # its weights are rounded, too

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        if isinstance(self.device, Gpu):
            self.inputs = taking_turns(self.num_bytes)

    @property
    def num_bytes(self) -> int:
        """Of all operands."""
        return self.n * self.k + 2 * self.rows * (self.n + self.k)

    def make_weights(self) -> tuple[Any, ...]:
        return tuple(map(self._weight, range(self.inputs)))

    def _weight(self, number: int) -> ScaledWeight:
        return scaled_weight(self.device, f"{self.name} w {number}", (self.n, self.k))

    def _dense(self, number: int) -> Any:
        """The weight in fp32."""
        return dequantized(self.device.xp, *self.weights[number])

    def reference(self, number: int = 0) -> Any:
        return wide(self.xs[number]) @ self._dense(number).T

    def rivals(self, gpu: Gpu) -> dict[str, Rival]:
        operation, outs = Matmul(world=self.world), self.new_outs()
        calls = [
            partial(operation, x, self._dense(n).astype(DTYPES[self.dtype]), out)
            for n, (x, out) in enumerate(zip(self.xs, outs, strict=True))
        ]
        timed = self.timed_calls(gpu, calls)
        self.baseline = in_turn(timed)
        return {"baseline": Rival(timed, outs, (operation,))}

    def limits(self, gemm_ms: float) -> tuple[float, float]:
        assert isinstance(self.device, Gpu)
        flops = 2 * self.rows * self.n * self.k
        return roofline_ms(self.num_bytes, flops, self.device.rates), 0.0

    def fields(self) -> dict[str, Any]:
        return {**Workload.fields(self), "w_layout": SCALING.w_layout}

    def converted(self, convert: Callable[[Any], Any]) -> Workload:
        weights, self.weights = self.weights, ()
        workload = super().converted(convert)
        self.weights = weights
        workload.weights = tuple(ScaledWeight(*map(convert, w)) for w in weights)
        return workload


class QuantizedWorkload(Float8Workload):
    """x [M, K], which is quantized, and a weight [N, K] of float8 -> [M, N]."""

    op = "matmul_float8_activations"
    leeway = 1.5  # the tensor cores add products with fewer bits
    baseline_leeway = 12.0  # x is not quantized

    def make(self, schedule: str, **options: Any) -> Any:
        return super().make(schedule, activations=FLOAT8, **options)

    def reference(self, number: int = 0) -> Any:
        return requantized(self.device.xp, self.xs[number]) @ self._dense(number).T

    def rivals(self, gpu: Gpu) -> dict[str, Rival]:
        rivals = super().rivals(gpu)
        if gpu.torch is not None and self.dtype == DTYPE:
            rows = aligned(self.rows, ALIGNED)
            outs = [gpu.empty((rows, self.n), self.dtype) for _ in range(self.inputs)]
            if calls := self._scaled_mms(gpu, outs):
                of_rows = [out[: self.rows] for out in outs]
                rivals["scaled_mm"] = Rival(calls, of_rows)
        return rivals

    def _scaled_mms(self, gpu: Gpu, outs: Sequence[Any]) -> list[Call]:
        """Calls of torch's scaled product, with whole blocks of zeros after K if it has
        none for K; none of a torch or a GPU without it."""
        for depth in dict.fromkeys((self.k, aligned(self.k, BLOCK))):
            try:
                quantize = compiled_quantization(gpu, depth)
                make = partial(self._scaled_mm, gpu, quantize, depth)
                return [
                    captured(gpu, make(out_idx, out))
                    for out_idx, out in enumerate(outs)
                ]
            except (RuntimeError, ValueError, AttributeError) as error:
                print(f"{self.name}: no scaled product of torch, K {depth}: {error}")
        return []

    def _scaled_mm(
        self,
        gpu: Gpu,
        quantize: Callable[[Any], tuple[Any, Any]],
        depth: int,
        number: int,
        out: Any,
    ) -> Call:
        """torch's scaled product, after a quantization of x to `depth` columns."""
        torch = gpu.torch
        pad = torch.nn.functional.pad
        codes, scales = map(gpu.as_torch, self.weights[number])
        w = pad(codes, (0, depth - self.k)).view(torch.float8_e4m3fn).t()
        of_w = pad(scales, (0, -scales.shape[1] % ALIGNED)).t()
        x, y = gpu.as_torch(self.xs[number]), gpu.as_torch(out)
        kinds = torch.nn.functional.ScalingType
        rows, blocks = kinds.BlockWise1x128.value, kinds.BlockWise128x128.value

        def call() -> None:
            x_codes, of_x = quantize(x)
            # `torch.nn.functional.scaled_mm`, which has no `out`.
            torch._scaled_mm_v2(
                x_codes,
                w,
                [of_x],
                [rows],
                [],
                [of_w],
                [blocks],
                [],
                None,
                y.dtype,
                out=y,
            )

        return call

    def limits(self, gemm_ms: float) -> tuple[float, float]:
        """Of twice the rate of the tensor cores."""
        assert isinstance(self.device, Gpu)
        memory, flops = self.device.rates
        products = 2 * self.rows * self.n * self.k
        return roofline_ms(self.num_bytes, products, (memory, 2 * flops)), 0.0

    def fields(self) -> dict[str, Any]:
        layout = replace(SCALING, quantizes=True).w_layout
        policy = self.made["ours"].policy(self.rows, self.n, self.k)
        return {**Workload.fields(self), "w_layout": layout, "policy": policy}


def aligned(size: int, step: int) -> int:
    """The next multiple of `step`."""
    return -(-size // step) * step


def requantized(xp: Any, x: Any) -> Any:
    """What the codes of x are of, in fp32, of NumPy or CuPy: see `quantize_rows`."""
    values = wide(x)
    for start in range(0, values.shape[1], BLOCK):
        group = values[:, start : start + BLOCK]
        most = xp.maximum(xp.abs(group).max(axis=1, keepdims=True), np.float32(LEAST))
        group *= np.float32(MOST_E4M3) / most
        _, exponents = xp.frexp(group)
        steps = xp.maximum(exponents - 1, -6) - 3  # 3 bits after the first one
        group[...] = xp.ldexp(xp.rint(xp.ldexp(group, -steps)), steps)
        group *= most / np.float32(MOST_E4M3)
    return values


def compiled_quantization(gpu: Gpu, depth: int) -> Callable[[Any], tuple[Any, Any]]:
    """Codes and scales of rows [m, k]: the codes with zeros up to `depth` columns and
    ALIGNED rows, the scales with groups as rows in memory; by torch.compile for these
    sizes."""
    torch = gpu.torch
    torch.compiler.reset()  # NOTE: it compiles only for a few sizes

    def quantize(x: Any) -> tuple[Any, Any]:
        padding = 0, aligned(depth, BLOCK) - x.shape[1], 0, -len(x) % ALIGNED
        padded = torch.nn.functional.pad(x.float(), padding)
        groups = padded.view(len(padded), -1, BLOCK)
        most = groups.abs().amax(2).clamp(min=LEAST)
        values = groups * (MOST_E4M3 / most)[:, :, None]
        codes = values.clamp(-MOST_E4M3, MOST_E4M3).to(torch.float8_e4m3fn)
        codes = codes.view(len(padded), -1)[:, :depth].contiguous()
        return codes, (most / MOST_E4M3).t().contiguous().t()

    function: Callable[[Any], tuple[Any, Any]] = torch.compile(
        quantize, fullgraph=True, dynamic=False
    )
    return function


def is_drawn(options: Namespace) -> bool:
    """Whether sizes follow from the commit."""
    return not (options.models or options.rows)


@dataclass(frozen=True)
class DrawnShapes(Shapes):
    """Those that the commit gives for an operation, unless options name some."""

    op: str

    def of(self, run: Run) -> list[tuple[str, Any, int]]:
        if not is_drawn(run.options) or not isinstance(run.device, Gpu):
            return super().of(run)
        run.shared["seed"] = seed_of(commit(), self.op, 1)
        drawn = draws(SIZES[self.op], run.shared["seed"])
        return [(f"draw {draw.number}", (draw.n, draw.k), draw.rows) for draw in drawn]


def measure(run: Run) -> Iterator[Result]:
    """The results, then the summary of drawn sizes."""
    is_quantized = run.options.activations == FLOAT8
    kind = QuantizedWorkload if is_quantized else Float8Workload
    rows = (1024, 2048, 4096, 8192) if is_quantized else SHAPES.rows
    shapes = DrawnShapes(SHAPES.models, SHAPES.small, rows, kind.op)
    results: list[Record] = []
    make = partial(kind, dtype=run.options.dtype)
    for values, wrong in measure_shapes(run, make, shapes):
        if not wrong:
            results.append(Record(**{**run.shared, **values}))
        yield values, wrong
    if "seed" in run.shared:
        check_gates(run, kind.op, results)


def add_options(parser: ArgumentParser) -> None:
    add_shapes(parser, SHAPES.models)
    parser.add_argument("--activations", choices=ACTIVATIONS, default=ACTIVATIONS[0])
    parser.add_argument("--dtype", choices=ELEMENTS, default=DTYPE)
    add_batch(parser)


SUBJECTS = {
    "matmul_float8": Subject(
        "Check and time a multiplication by float8 weights.",
        measure,
        add_options,
        refusal=lambda options: refusal(options) if is_drawn(options) else "",
    )
}
