"""Matrix multiplication on one GPU, against cuBLAS: replayed CUDA graphs.

Weights of over 1 GB are used in turn. The limit is the roofline: 4.3 TB/s and 780
TFLOP/s on an H200, elsewhere 94 % of a read of 1 GiB and cuBLAS's best rate in the run.
--batch also times deterministic="batch", here and in mlp, moe and decode."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Iterator
from functools import partial
from typing import Any

from benchmarks.device import WARM_UP, Gpu, captured, roofline_ms, wide
from benchmarks.harness import Result, Run, Subject, add_batch, add_shapes
from benchmarks.protocol import measure_shapes
from benchmarks.workload import BLOCK, DTYPE, Rival, Shapes, Workload, in_turn
from etc_dist import Matmul
from etc_dist.ops.argument_table import DTYPES

SHAPES = Shapes(
    models={
        f"{n}x{k}": (n, k)
        for n, k in (
            *((4096, 4096), (5120, 25600)),  # of decode steps; others of collectives
            *((4096, 1792), (5120, 3200), (8192, 3584), (12288, 6144), (16384, 6656)),
            *((3584, 4096), (6400, 5120), (7168, 8192), (12288, 12288)),
            (13312, 16384),
        )
    },
    small=((264, 136), 20),
    rows=(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1000, 1024, 2048, 4096, 8192),
)
"""N and K."""
ROTATED_BYTES = 1.05e9
"""All weights together: none is in the L2 cache."""
PROTOCOL = (
    "2 ms device sleep, event, call, event; each call a replayed CUDA graph; weights "
    f"of {ROTATED_BYTES / 1e9} GB take turns; median after {WARM_UP} warm-ups; blocks "
    f"of {BLOCK} take turns"
)


def taking_turns(num_bytes: float, least: int = 2) -> int:
    """The number of weights of so many bytes that take turns."""
    return max(least, -int(-ROTATED_BYTES // num_bytes))


class MatmulWorkload(Workload):
    """x [M, K] and w [N, K] -> [M, N], with weights that take turns."""

    op = "matmul"
    protocol = PROTOCOL
    baseline_leeway = 1.0
    is_replayed = True

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        if isinstance(self.device, Gpu):
            self.inputs = taking_turns(2 * self.n * self.k)

    def x(self, rank: int, number: int = 0) -> Any:
        return self.draw("x", rank, self.rows, self.k)

    def make_weights(self) -> tuple[Any, ...]:
        drawn = [self.draw(f"w {i}", 0, self.n, self.k) for i in range(self.inputs)]
        if self.layout == "kn":
            drawn = [self.device.transposed(w) for w in drawn]
        return tuple(drawn)

    @property
    def out_shape(self) -> tuple[int, int]:
        return self.rows, self.n

    def make(self, schedule: str, **options: Any) -> Any:
        return Matmul(world=self.world, schedule=schedule, **options)

    def arguments(self, number: int) -> tuple[Any, ...]:
        return self.xs[number], self.weights[number]

    def reference(self, number: int = 0) -> Any:
        return wide(self.xs[number]) @ wide(self.weights[number]).T

    def rivals(self, gpu: Gpu) -> dict[str, Rival]:
        outs = self.new_outs()
        arrays = zip(self.xs, self.weights, outs, strict=True)
        calls = [captured(gpu, gpu.matmul(*operands)) for operands in arrays]
        self.baseline = in_turn(calls)
        return {"baseline": Rival(calls, outs)}

    def limits(self, gemm_ms: float) -> tuple[float, float]:
        assert isinstance(self.device, Gpu)
        moved = 2 * (self.n * self.k + self.rows * (self.n + self.k))
        flops = 2 * self.rows * self.n * self.k
        return roofline_ms(moved, flops, self.device.rates), 0.0

    def fields(self) -> dict[str, Any]:
        m, n, k, is_kn = self.rows, self.n, self.k, self.layout == "kn"
        policies = {
            f"{prefix}policy": self.made[name].policy(m, n, k, transposed=is_kn)
            for name, prefix in (("ours", ""), ("batch", "batch_"))
            if name in self.made
        }
        return {**super().fields(), "w_layout": self.layout, **policies}


def measure(run: Run) -> Iterator[Result]:
    options = run.options
    make = partial(MatmulWorkload, dtype=options.dtype, layout=options.layout)
    return measure_shapes(run, make, SHAPES)


def add_options(parser: ArgumentParser) -> None:
    add_shapes(parser, SHAPES.models)
    parser.add_argument("--dtype", choices=DTYPES, default=DTYPE)
    parser.add_argument("--layout", choices=("nk", "kn"), default="nk")
    add_batch(parser)


SUBJECTS = {
    "matmul": Subject("Check and time a matrix multiplication.", measure, add_options)
}
