"""All-reduces at sizes that follow from the commit: alone, with residual and RMSNorm,
and after a matmul.

Rivals are NCCL's all-reduce, and for bfloat16 the one-shot and two-shot ones of torch's
symmetric memory, none of them by multicast; the fastest is the baseline. Before them
cuBLAS stores the product where they read it; after them torch.compile makes one kernel
of residual and norm. All calls are replayed CUDA graphs. Operands stay in the L2 cache,
as those of a decode step do. A gate that is not met is recorded as a failure of the
run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from benchmarks.device import Call, Device, Gpu, captured, wide
from benchmarks.random_sizes import (
    SIZES,
    Draw,
    Sizes,
    Variant,
    draws,
    log_uniform,
)
from benchmarks.subjects.random_sizes import CPU_DRAWS, Choice, Random, subject
from benchmarks.workload import BLOCK, Rival, run_steps
from etc_dist import AllReduce, AllReduceNorm, MatmulAllReduce
from etc_dist.ops.exchange_model import ALGORITHMS, AllReduceSizes
from etc_dist.ops.operation import kept

PROTOCOL = (
    "2 ms device sleep, all-reduce in stream, event, call, event; each call a replayed "
    f"CUDA graph; max over ranks; median after warm-ups; blocks of {BLOCK} take turns"
)
EPS = 1e-6
NUM_ALL_REDUCES, NUM_NORMS, NUM_MATMULS = 24, 12, 24
LEAST_BYTES, MOST_BYTES = 2048, 64 << 20
WIDTHS = 1024, 16384
"""The least and the largest H of an all-reduce, of the latter also if it is small."""
NORM_ROWS, NORM_WIDTHS = (1, 256), (2048, 16384)
DTYPES = "bfloat16", "bfloat16", "bfloat16", "float16"


def _width(rng: np.random.Generator, low: float, high: float) -> int:
    """A multiple of 8."""
    return max(8, round(log_uniform(rng, low, high) / 8) * 8)


def all_reduce_draws(seed: str, most_bytes: float = MOST_BYTES) -> Iterator[Draw]:
    """Bytes of x, and H, are uniform in their logarithms."""
    rng = np.random.default_rng(int(seed, 16))
    for number in range(NUM_ALL_REDUCES):
        elements = log_uniform(rng, LEAST_BYTES, most_bytes) / 2
        columns = _width(rng, *(min(width, elements) for width in WIDTHS))
        rows = max(1, round(elements / columns))
        variant = Variant(DTYPES[number % len(DTYPES)])
        yield Draw(seed, number, rows, columns, columns, variant)


def norm_draws(seed: str, most_rows: int = NORM_ROWS[1]) -> Iterator[Draw]:
    """M and H are uniform in their logarithms."""
    rng = np.random.default_rng(int(seed, 16))
    for number in range(NUM_NORMS):
        rows = round(log_uniform(rng, NORM_ROWS[0], most_rows))
        columns = _width(rng, *NORM_WIDTHS)
        variant = Variant(DTYPES[number % len(DTYPES)])
        yield Draw(seed, number, rows, columns, columns, variant)


class Summed(Random):
    """x [M, H] of each rank, and the sum on each of them."""

    is_replayed = True
    protocol, libraries = PROTOCOL, "symmetric memory of torch without multicast; "
    operation: Any
    predicts = False
    """Whether the predicted time is that of the whole operation."""

    def x(self, rank: int, number: int = 0) -> Any:
        return self.draw("x", rank, self.rows, self.n)

    def make_weights(self) -> tuple[Any, ...]:
        return ()

    @property
    def turns(self) -> list[tuple[Any, ...]]:
        return [self.weights]

    @property
    def out_shape(self) -> tuple[int, int]:
        return self.rows, self.n

    def make(self, schedule: str, **options: Any) -> Any:
        return kept(self.world, self.operation, schedule=schedule)

    def total(self) -> Any:
        """The sum over ranks in fp32."""
        return sum(wide(self.x(rank)) for rank in range(self.world.size))

    def reference(self, number: int = 0) -> Any:
        return self.total()

    def fields(self) -> dict[str, Any]:
        return {**Random.fields(self), "M": self.rows, "N": self.n, "K": self.k}

    def limits(self, gemm_ms: float) -> tuple[float, float]:
        return gemm_ms, 0.0  # a draw has no limit

    def choices(self) -> list[Choice]:
        """The algorithm that the policy chooses."""
        program, size = self.made["ours"].program, self.world.size
        dims = {"rows": self.rows, "vectors": self.n // 8, "k": self.k}
        if program.plan.policy is None:
            return []
        values = {c.dim: c.value for c in program.plan.policy(dims, program.workers)}
        algorithm = values["algorithm"]
        exchange = AllReduceSizes(self.rows * self.n // 8, 1, size, size)
        us = exchange.predicted_us(algorithm) if self.predicts else 0.0
        return [Choice({}, ALGORITHMS[algorithm], us)]

    def before(self, gpu: Gpu, source: Any) -> dict[str, Call]:
        """The steps that fill the source of a rival's all-reduce."""
        source[...] = self.xs[0]
        return {}

    def after(self, gpu: Gpu, total: Any, out: Any) -> dict[str, Call]:
        """The steps that follow it."""
        return {}

    def rivals(self, gpu: Gpu) -> dict[str, Rival]:
        """Of torch's symmetric memory where torch is installed."""
        shape, rival_by_name = (self.rows, self.n), {}
        for name in gpu.all_reduces(self.dtype):
            source, all_reduce = gpu.all_reduce_of(name, shape, self.dtype)
            (out,) = self.new_outs()
            has_end = type(self).after is not Summed.after
            total = gpu.empty(shape, self.dtype) if has_end else out
            steps = {**self.before(gpu, source), "sum": all_reduce(total)}
            steps |= self.after(gpu, total, out)
            call = captured(gpu, partial(run_steps, steps))
            rival_by_name[name] = Rival(
                [call], [out], fill=partial(self.before, gpu, source)
            )
        self.baselines = tuple(rival_by_name)
        return rival_by_name

    def durations(self, times: Mapping[str, Sequence[float]]) -> dict[str, Any]:
        values = Random.durations(self, times)
        return {**values, "num_bytes": self.rows * self.n * 2}


class RandomAllReduce(Summed):
    op = "all_reduce"
    operation, predicts = AllReduce, True

    @staticmethod
    def drawn(op: str, seed: str, ranks: int, *, is_timed: bool) -> list[Draw]:
        if is_timed:
            return [*all_reduce_draws(seed)]
        return [*all_reduce_draws(seed, 2**15)][:CPU_DRAWS]


class RandomAllReduceNorm(Summed):
    op = "all_reduce_norm"
    operation = AllReduceNorm
    libraries = f"{Summed.libraries}residual and RMSNorm by torch.compile; "

    @staticmethod
    def drawn(op: str, seed: str, ranks: int, *, is_timed: bool) -> list[Draw]:
        if is_timed:
            return [*norm_draws(seed)]
        return [*norm_draws(seed, 4)][:CPU_DRAWS]

    def make(self, schedule: str, **options: Any) -> Any:
        return kept(self.world, AllReduceNorm, eps=EPS, schedule=schedule)

    def make_weights(self) -> tuple[Any, ...]:
        """The residual and the gain, alike on all ranks."""
        return self.draw("residual", 0, self.rows, self.n), self.draw("gain", 0, self.n)

    def call(self, operation: Any, weights: Sequence[Any], out: Any) -> Call:
        total = self.device.empty(self.out_shape, self.dtype)
        return partial(operation, self.xs[0], *weights, out, total)

    def reference(self, number: int = 0) -> Any:
        residual, gain = map(wide, self.weights)
        # Rounded, as the sum that is the new residual.
        total = wide((self.total() + residual).astype(self.xs[0].dtype))
        mean = (total * total).mean(axis=1, keepdims=True)
        return total / self.device.xp.sqrt(mean + np.float32(EPS)) * gain

    def after(self, gpu: Gpu, total: Any, out: Any) -> dict[str, Call]:
        residual, gain = self.weights
        return {"norm": gpu.compiled_add_norm(total, residual, gain, EPS, out)}


class RandomMatmulAllReduce(Summed):
    op = "matmul_all_reduce"
    operation = MatmulAllReduce
    baseline_leeway = 2.0

    @staticmethod
    def drawn(op: str, seed: str, ranks: int, *, is_timed: bool) -> list[Draw]:
        """N, K and the rows of all ranks as of the random collectives."""
        sizes: Sizes = SIZES["random_reduce_scatter"]
        drawn = list(draws(sizes if is_timed else sizes.small, seed, ranks))
        return drawn[: NUM_MATMULS if is_timed else CPU_DRAWS]

    def __init__(self, device: Device, drawn: Draw):
        super().__init__(device, drawn)
        self.rows *= device.world.size

    def x(self, rank: int, number: int = 0) -> Any:
        return self.draw("x", rank, self.rows, self.k)

    def w(self, rank: int) -> Any:
        return self.draw("w", rank, self.n, self.k)

    def make_weights(self) -> tuple[Any, ...]:
        w = self.w(self.world.rank)
        return (self.device.transposed(w) if self.layout == "kn" else w,)

    def total(self) -> Any:
        ranks = range(self.world.size)
        return sum(wide(self.x(rank)) @ wide(self.w(rank)).T for rank in ranks)

    def before(self, gpu: Gpu, source: Any) -> dict[str, Call]:
        (w,) = self.weights
        return {"gemm": gpu.matmul(self.xs[0], w, source)}


KINDS = (RandomAllReduce, RandomAllReduceNorm, RandomMatmulAllReduce)
SUBJECTS = {kind.op: subject(kind) for kind in KINDS}
