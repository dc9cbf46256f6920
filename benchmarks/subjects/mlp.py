"""The dense MLP as one program, against the five unfused steps of NCCL and cuBLAS.

two_ops_ms: our two collectives with SwiGLU between them. A model's inner size is
divided by 8 on any number of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from benchmarks.device import Call, Gpu, wide
from benchmarks.subjects.collectives import Stepwise, subject
from benchmarks.workload import TENSOR_PARALLEL, Rival, run_steps
from etc_dist import AllGatherMatmul, MatmulReduceScatter
from etc_dist.layers.mlp import MLP


class MLPWorkload(Stepwise):
    """x [M / W, N], gate and up [K, N], stored as one, and down [N, K] on each rank ->
    [M / W, N]: N is the hidden size, K a rank's shard of the inner one."""

    op = "mlp"
    spreads_nan = True
    alone: Mapping[str, tuple[str, ...]] = {
        "gemm": ("gate_up", "down"),
        "collective": ("all_gather", "reduce_scatter"),
    }
    leeway, baseline_leeway = 1.25, 2.5
    """The activations are rounded too."""

    @staticmethod
    def sizes_of(hidden: int, intermediate: int) -> tuple[int, int]:
        return hidden, intermediate // TENSOR_PARALLEL

    def x(self, rank: int, number: int = 0) -> Any:
        return self.draw("x", rank, self.rows, self.n)

    def make_weights(self) -> tuple[Any, ...]:
        return self.weights_of(self.world.rank)

    def weights_of(self, rank: int) -> tuple[Any, Any]:
        gate_up = self.draw("gate and up", rank, 2 * self.k, self.n)
        return gate_up, self.draw("down", rank, self.n, self.k)

    @property
    def out_shape(self) -> tuple[int, int]:
        return self.rows, self.n

    @property
    def moved(self) -> int:
        # Gathered rows and partial sums use the same links.
        return 2 * self.m * self.n

    def make(self, schedule: str, **options: Any) -> MLP:
        gate_up, down = self.weights
        return MLP(
            gate_up[: self.k],
            gate_up[self.k :],
            down,
            world=self.world,
            schedule=schedule,
            **options,
        )

    def reference(self, number: int = 0) -> Any:
        x = wide(self.xs[number])
        total = self.device.xp.zeros(x.shape, x.dtype)
        for rank in range(self.world.size):
            gate_up, down = map(wide, self.weights_of(rank))
            gate_and_up = x @ gate_up.T
            gate, up = gate_and_up[:, : self.k], gate_and_up[:, self.k :]
            total += (gate / (1 + self.device.xp.exp(-gate)) * up) @ down.T
        return total

    def steps(
        self, gpu: Gpu, x: Any, gate_up: Any, down: Any, out: Any
    ) -> dict[str, Call]:
        shapes = (self.m, self.n), (self.m, 2 * self.k), (self.m, self.k)
        all_x, gate_and_up, active = (gpu.empty(shape, self.dtype) for shape in shapes)
        partial_sum = gpu.empty((self.m, self.n), self.dtype)
        return {
            "all_gather": gpu.all_gather(x, all_x),
            "gate_up": gpu.matmul(all_x, gate_up, gate_and_up),
            "swiglu": gpu.swiglu(gate_and_up, active),
            "down": gpu.matmul(active, down, partial_sum),
            "reduce_scatter": gpu.reduce_scatter(partial_sum, out),
        }

    def rivals(self, gpu: Gpu) -> dict[str, Rival]:
        """The steps, and our two fused collectives one after the other."""
        gate_up, down = self.weights
        gather = AllGatherMatmul(world=self.world)
        scatter = MatmulReduceScatter(world=self.world)
        gate_and_up = gpu.empty((self.m, 2 * self.k), self.dtype)
        active = gpu.empty((self.m, self.k), self.dtype)
        outs = self.new_outs()
        steps: dict[str, Call] = {
            "gate_up": partial(gather, self.xs[0], gate_up, gate_and_up),
            "swiglu": gpu.swiglu(gate_and_up, active),
            "down": partial(scatter, active, down, outs[0]),
        }
        two = Rival([partial(run_steps, steps)], outs, (gather, scatter))
        return {**super().rivals(gpu), "two_ops": two}


SUBJECTS = {"mlp": subject(MLPWorkload, has_batch=True)}
