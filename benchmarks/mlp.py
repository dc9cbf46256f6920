"""The dense MLP as one program, against NCCL and cuBLAS in a row.

launch/mpirun -n 4 benchmarks/mlp.py --models llama3-8b,llama3-70b --schedule dynamic
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.device import Call, Device
from benchmarks.harness import TENSOR_PARALLEL, Case, Chain, Shape, Workload, main, run
from etc_dist import AllGatherMatmul, MatmulReduceScatter
from etc_dist.layers.mlp import MLP
from etc_dist.world import World


class MLPWorkload(Workload):
    """x [M / W, N], gate and up [K, N], stored as one, and down [N, K] on each rank ->
    [M / W, N]: N is the hidden size, K a rank's share of the inner one."""

    name = "mlp"
    parts: Mapping[str, tuple[str, ...]] = {
        "gemm": ("gate_up", "down"),
        "collective": ("all_gather", "reduce_scatter"),
    }
    leeway = 1.25
    """The activations are rounded too."""

    def sizes(self, hidden: int, intermediate: int) -> tuple[int, int]:
        return hidden, intermediate // TENSOR_PARALLEL

    def x_shape(self, shape: Shape) -> tuple[int, int]:
        return shape.rows, shape.n

    def weight_shapes(self, shape: Shape) -> tuple[tuple[int, int], ...]:
        return (2 * shape.k, shape.n), (shape.n, shape.k)

    def out_shape(self, shape: Shape) -> tuple[int, int]:
        return shape.rows, shape.n

    def moved(self, shape: Shape) -> int:
        # Gathered rows and partial sums leave a rank by the same links.
        return 2 * shape.m * shape.n

    def steps(
        self, device: Device, shape: Shape, x: Any, gate_up: Any, down: Any, out: Any
    ) -> dict[str, Call]:
        xp, m = device.xp, shape.m
        gathered, partial_sum = (xp.empty((m, shape.n), x.dtype) for _ in range(2))
        product = xp.empty((m, 2 * shape.k), x.dtype)
        active = xp.empty((m, shape.k), x.dtype)
        return {
            "all_gather": device.all_gather(x, gathered),
            "gate_up": device.matmul(gathered, gate_up, product),
            "swiglu": device.swiglu(product, active),
            "down": device.matmul(active, down, partial_sum),
            "reduce_scatter": device.reduce_scatter(partial_sum, out),
        }

    def make(self, world: World, case: Case, schedule: str) -> MLP:
        gate_up, down = case.weights
        inner = case.shape.k
        weights = gate_up[:inner], gate_up[inner:], down
        return MLP(*weights, world=world, schedule=schedule)

    def call(self, operation: Any, case: Case) -> Call:
        return partial(operation, case.x, case.out)

    def rivals(self, device: Device, case: Case) -> dict[str, Chain]:
        """Our two fused collectives in a row, by static schedules."""
        shape, (gate_up, down) = case.shape, case.weights
        gather = AllGatherMatmul(dtype=case.dtype, world=device.world)
        scatter = MatmulReduceScatter(dtype=case.dtype, world=device.world)
        product = device.empty((shape.m, 2 * shape.k), case.dtype)
        active = device.empty((shape.m, shape.k), case.dtype)
        out = device.empty(case.out.shape, case.dtype)
        steps: dict[str, Call] = {
            "gate_up": partial(gather, case.x, gate_up, product),
            "swiglu": device.swiglu(product, active),
            "down": partial(scatter, active, down, out),
        }
        return {"two_ops": Chain((gather, scatter), partial(run, steps), out)}


if __name__ == "__main__":
    sys.exit(main(MLPWorkload()))
