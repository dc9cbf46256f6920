"""Matrix multiplication on one GPU, against cuBLAS.

launch/mpirun -n 1 benchmarks/matmul.py --rows-per-rank 1,64,4096 --models 4096x4096
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.device import Call, Device, Gpu, roofline_ms, wide
from benchmarks.harness import add_batch, begin, main, shapes_parser
from benchmarks.moe_torch import captured, captured_ours
from benchmarks.workload import (
    BLOCK,
    DTYPE,
    WARM_UP,
    Calls,
    Rival,
    Workload,
    in_turn,
)
from etc_dist import Matmul
from etc_dist.ops.argument_table import DTYPES
from etc_dist.ops.operation import Operation

SIZES: Mapping[str, tuple[int, int]] = {
    f"{n}x{k}": (n, k)
    for n, k in (
        (4096, 4096),
        (5120, 25600),
        (4096, 1792),
        (5120, 3200),
        (8192, 3584),
        (12288, 6144),
        (16384, 6656),
        (3584, 4096),
        (6400, 5120),
        (7168, 8192),
        (12288, 12288),
        (13312, 16384),
    )
}
"""N and K: two of decode steps, and those of the collectives' benchmarks."""
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1000, 1024, 2048, 4096, 8192)
SMALL, SMALL_ROWS = (264, 136), 20
ROTATED_BYTES = 1.05e9
"""All weights together: none is in the L2 cache."""
PROTOCOL = (
    "2 ms device sleep, event, call, event; each call a replayed CUDA graph; weights "
    f"of {ROTATED_BYTES / 1e9} GB take turns; median after {WARM_UP} warm-ups; blocks "
    f"of {BLOCK} take turns"
)


def taking_turns(n: int, k: int) -> int:
    """The number of weights [n, k] that take turns."""
    return max(2, -int(-ROTATED_BYTES // (2 * n * k)))


class MatmulWorkload(Workload):
    """x [M, K] and w [N, K] -> [M, N], with weights that take turns."""

    op = "matmul"
    protocol = PROTOCOL
    baseline_leeway = 1.0

    def __init__(
        self,
        device: Device,
        name: str,
        sizes: Sequence[int],
        rows: int,
        dtype: str = DTYPE,
        layout: str = "nk",
    ):
        super().__init__(device, name, sizes, rows, dtype, layout)
        self.n, self.k = sizes
        self._of_batch: dict[str, str] = {}
        if isinstance(device, Gpu):
            self.inputs = taking_turns(self.n, self.k)

    def x(self, rank: int, number: int = 0) -> Any:
        return self.draw("x", rank, self.rows, self.k)

    def make_weights(self) -> tuple[Any, ...]:
        drawn = [self.draw(f"w {i}", 0, self.n, self.k) for i in range(self.inputs)]
        return (
            tuple(map(self.device.transposed, drawn))
            if self.layout == "kn"
            else tuple(drawn)
        )

    @property
    def out_shape(self) -> tuple[int, int]:
        return self.rows, self.n

    def make(self, schedule: str) -> Operation:
        self._made = Matmul(world=self.world, schedule=schedule)
        return self._made

    def call(self, operation: Any, number: int) -> Call:
        arrays = self.xs[number], self.weights[number], self.outs[number]
        return partial(operation, *arrays)

    def reference(self, number: int = 0) -> Any:
        return wide(self.xs[number]) @ wide(self.weights[number]).T

    def rivals(self, gpu: Gpu) -> dict[str, Rival]:
        arrays = self._arrays(gpu)
        calls = [captured(gpu, gpu.matmul(*each)) for each in arrays]
        self._baseline = in_turn(calls)
        rivals = {"baseline": Rival(calls, [out for *_, out in arrays])}
        if self.has_batch:
            arrays = self._arrays(gpu)
            operation = Matmul(world=self.world, deterministic="batch")
            for each in arrays:  # a first call cannot be captured
                operation(*each)
            calls = [captured_ours(gpu, operation, *each) for each in arrays]
            outs = [out for *_, out in arrays]
            rivals["batch"] = Rival(calls, outs, (operation,))
            self._of_batch = {"batch_policy": self._policy(operation)}
        return rivals

    def _arrays(self, gpu: Gpu) -> list[tuple[Any, Any, Any]]:
        """The inputs with new outputs."""
        outs = [gpu.empty(self.out_shape, self.dtype) for _ in range(self.inputs)]
        return [*zip(self.xs, self.weights, outs, strict=True)]

    def parts(self, gpu: Gpu) -> Calls:
        return {"gemm": self._baseline}

    def timed(self, gpu: Gpu, ours: Operation, rivals: Mapping[str, Rival]) -> Calls:
        calls = super().timed(gpu, ours, rivals)
        arrays = zip(self.xs, self.weights, self.outs, strict=True)
        own = [captured_ours(gpu, ours, *each) for each in arrays]
        return {**calls, "ours": in_turn(own)}

    def limits(self, gemm_ms: float) -> tuple[float, float]:
        assert isinstance(self.device, Gpu)
        moved = 2 * (self.n * self.k + self.rows * (self.n + self.k))
        flops = 2 * self.rows * self.n * self.k
        return roofline_ms(moved, flops, self.device.rates), 0.0

    def fields(self) -> dict[str, Any]:
        return {
            "M": self.rows,
            "N": self.n,
            "K": self.k,
            "w_layout": self.layout,
            "policy": self._policy(self._made),
            **self._of_batch,
        }

    def _policy(self, operation: Matmul) -> str:
        sizes = self.rows, self.n, self.k
        return operation.policy(*sizes, transposed=self.layout == "kn")


def command_line() -> int:
    parser = shapes_parser("Check and time a matrix multiplication.", "matmul", SIZES)
    parser.add_argument("--dtype", choices=DTYPES, default=DTYPE)
    parser.add_argument("--layout", choices=("nk", "kn"), default="nk")
    add_batch(parser)
    options = parser.parse_args()
    make = partial(MatmulWorkload, dtype=options.dtype, layout=options.layout)
    device = begin(options.cpu)
    return main(device, make, SIZES, (SMALL, SMALL_ROWS), ROWS, options)


if __name__ == "__main__":
    sys.exit(command_line())
