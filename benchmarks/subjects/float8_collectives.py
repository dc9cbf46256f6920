"""All-gather + GEMM and GEMM + reduce-scatter with float8 activations, on several GPUs.
The baseline is ours in 16 bits, by the same weights.

Sizes are drawn from the commit. Those are measured whose GEMM in 16 bits takes at least
1.6 times as long as the transfer in 16 bits, by the rates of H200s."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any

from benchmarks.device import DTYPES, Gpu, dequantized
from benchmarks.random_sizes import Draw
from benchmarks.subjects.collectives import (
    AllGatherMatmulWorkload,
    MatmulReduceScatterWorkload,
)
from benchmarks.subjects.matmul import taking_turns
from benchmarks.subjects.matmul_float8 import requantized, scaled_weight
from benchmarks.subjects.random_sizes import Random, RandomCollective, subject
from benchmarks.workload import LINK_BYTES_PER_S, Rival
from etc_dist import ScaledWeight
from etc_dist.functions.scaled_weights import PER_BLOCK, Scaling
from etc_dist.ops.all_gather_matmul import NEED_FLOPS_PER_NS
from etc_dist.ops.operation import kept
from etc_dist.ops.scaled_weight import FLOAT8

SCALING = Scaling(PER_BLOCK, "float32", quantizes=True)
LEAST_GEMM = 1.6
"""Times the transfer."""


class Float8Collective(RandomCollective):
    """A collective of x, which is quantized, and a weight of float8."""

    libraries = "our collective in 16 bits; "
    leeway = 1.5  # the tensor cores add products with fewer bits
    baseline_leeway = 12.0  # x is not quantized

    @classmethod
    def is_long(cls, draw: Draw, ranks: int) -> bool:
        """Whether the GEMM of a draw takes long enough."""
        columns = draw.n if issubclass(cls, AllGatherMatmulWorkload) else draw.k
        gemm_s = 2 * columns / (NEED_FLOPS_PER_NS * 1e9)
        wire_s = 2 * (ranks - 1) / ranks / LINK_BYTES_PER_S
        return gemm_s >= LEAST_GEMM * wire_s

    @classmethod
    def drawn(cls, op: str, seed: str, ranks: int, *, is_timed: bool) -> list[Draw]:
        all_draws = Random.drawn(op, seed, ranks, is_timed=is_timed)
        return [d for d in all_draws if not is_timed or cls.is_long(d, ranks)]

    def scaled(self, rank: int) -> ScaledWeight:
        name = f"{self.name} w of rank {rank}"
        return scaled_weight(self.device, name, (self.n, self.k))

    def w(self, rank: int) -> Any:
        """In fp32."""
        return dequantized(self.device.xp, *self.scaled(rank))

    def rows_of(self, rank: int) -> Any:
        """What the codes of a rank's x are of, in fp32."""
        return requantized(self.device.xp, self.x(rank))

    def make_weights(self) -> tuple[Any, ...]:
        return (self.scaled(self.world.rank),)

    @cached_property
    def turns(self) -> list[tuple[Any, ...]]:
        (weight,) = self.weights
        count = 1
        if isinstance(self.device, Gpu):
            count = taking_turns(weight.codes.nbytes)
        copies = [
            (ScaledWeight(*(array.copy() for array in weight)),)
            for _ in range(count - 1)
        ]
        return [self.weights, *copies]

    def arguments(self, number: int) -> tuple[Any, ...]:
        return (self.xs[number], *self.weights)

    def make(self, schedule: str, **options: Any) -> Any:
        return kept(self.world, self.operation, schedule=schedule, activations=FLOAT8)

    def rivals(self, gpu: Gpu) -> dict[str, Rival]:
        operation, (out,) = self.operation(world=self.world), self.new_outs()
        weight = self.w(self.world.rank).astype(DTYPES[self.dtype])
        copies = [weight.copy() for _ in range(taking_turns(weight.nbytes) - 1)]
        calls = [partial(operation, self.xs[0], w, out) for w in (weight, *copies)]
        return {"baseline": Rival(calls, [out], (operation,))}

    def fields(self) -> dict[str, Any]:
        return {**super().fields(), "w_layout": SCALING.w_layout}


class Float8AllGather(Float8Collective, AllGatherMatmulWorkload):
    op = "float8_all_gather"

    def reference(self, number: int = 0) -> Any:
        rows = [self.rows_of(rank) for rank in range(self.world.size)]
        return self.device.xp.concatenate(rows) @ self.w(self.world.rank).T


class Float8ReduceScatter(Float8Collective, MatmulReduceScatterWorkload):
    op = "float8_reduce_scatter"

    def reference(self, number: int = 0) -> Any:
        first = self.world.rank * self.rows
        own_rows = slice(first, first + self.rows)
        ranks = range(self.world.size)
        return sum(self.rows_of(rank)[own_rows] @ self.w(rank).T for rank in ranks)


KINDS: Sequence[type[Float8Collective]] = (Float8AllGather, Float8ReduceScatter)
SUBJECTS = {kind.op: subject(kind) for kind in KINDS}
