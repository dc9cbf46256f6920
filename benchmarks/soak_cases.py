"""The calls that a soak mixes: operations and layers at small shapes, and what each of
them must return, by NumPy in fp32.

Every rank draws the inputs of all ranks, so no reference needs a collective: NCCL
refuses ranks that share a GPU.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from benchmarks.device import DTYPES
from benchmarks.harness import TOLERANCE
from etc_dist import AllGatherMatmul, MatmulReduceScatter
from etc_dist.layers.mlp import MLP
from etc_dist.layers.moe import MoE
from etc_dist.layers.sparse_block import SparseBlock
from etc_dist.ops.operation import Operation
from etc_dist.world import World

Host = np.ndarray[Any, Any]
SCHEDULES = ("static", "dynamic")
PRODUCTS = (("bfloat16", "nk"), ("float16", "kn"))
"""dtype and layout of w."""
PRODUCT_SHAPES = ((1, 8, 8), (3, 264, 72), (129, 256, 520), (300, 1000, 136))
"""Rows of one rank, N, K: one row, tails in every direction, several tiles."""
HIDDEN, INNER = 512, 264
"""Of the MLP, INNER for one rank."""
MLP_ROWS = (1, 16, 100, 300)
"""Of one rank: few rows, rows that share tiles, whole tiles."""
EXPERTS, TOP_K, MOE_HIDDEN, MOE_INNER = 16, 4, 256, 64
"""MOE_INNER is one rank's share if the layer is tensor-parallel."""
MOE_TOKENS = (1, 5, 64, 200)
LEEWAY = 2.0
"""Times TOLERANCE: errors of few numbers scatter, and layers round activations too."""


@dataclass(frozen=True)
class Case:
    """One call with its arrays on the device; `first` is what it returned first."""

    name: str
    operation: Operation
    call: Callable[[], Any]
    out: Any
    first: Any
    expected: Host
    tolerance: float


@dataclass(frozen=True)
class Cases:
    """Makes the cases of one rank; `put` moves a host array to the device."""

    world: World
    put: Callable[[Host], Any]

    def __iter__(self) -> Iterator[Case]:
        """All cases, made by all ranks in the same order."""
        for schedule in SCHEDULES:
            for dtype, layout in PRODUCTS:
                yield from self._matmul_reduce_scatter(schedule, dtype, layout)
                yield from self._all_gather_matmul(schedule, dtype, layout)
            yield from self._mlp(schedule)
            for parallel in ("tensor", "expert"):
                yield from self._moe(schedule, parallel)

    def _matmul_reduce_scatter(
        self, schedule: str, dtype: str, layout: str
    ) -> Iterator[Case]:
        how: dict[str, Any] = {"dtype": dtype, "w_layout": layout, "schedule": schedule}
        operation = MatmulReduceScatter(world=self.world, **how)
        for rows, n, k in PRODUCT_SHAPES:
            name = f"matmul_reduce_scatter {schedule} {dtype} {rows} x {n} x {k}"
            size = self.world.size
            xs = self._each((rows * size, k), dtype, f"{name} x", 1)
            ws = self._each((n, k), dtype, f"{name} w", k)
            total = sum(wide(x) @ wide(w).T for x, w in zip(xs, ws, strict=True))
            arrays = xs[self._rank], stored(ws[self._rank], layout)
            expected = np.split(total, size)[self._rank]
            yield self._case(name, operation, arrays, expected, dtype)

    def _all_gather_matmul(
        self, schedule: str, dtype: str, layout: str
    ) -> Iterator[Case]:
        how: dict[str, Any] = {"dtype": dtype, "w_layout": layout, "schedule": schedule}
        operation = AllGatherMatmul(world=self.world, **how)
        for rows, n, k in PRODUCT_SHAPES:
            name = f"all_gather_matmul {schedule} {dtype} {rows} x {n} x {k}"
            xs = self._each((rows, k), dtype, f"{name} x", 1)
            w = self._each((n, k), dtype, f"{name} w", k)[self._rank]
            expected = wide(np.concatenate(xs)) @ wide(w).T
            arrays = xs[self._rank], stored(w, layout)
            yield self._case(name, operation, arrays, expected, dtype)

    def _mlp(self, schedule: str, dtype: str = "bfloat16") -> Iterator[Case]:
        gates, ups = (
            self._each((INNER, HIDDEN), dtype, f"mlp {name}", HIDDEN)
            for name in ("gate", "up")
        )
        downs = self._each((HIDDEN, INNER), dtype, "mlp down", INNER)
        shares = list(zip(gates, ups, downs, strict=True))
        own = map(self.put, shares[self._rank])
        operation = MLP(*own, world=self.world, schedule=schedule)
        for rows in MLP_ROWS:
            name = f"mlp {schedule} {rows} rows"
            xs = self._each((rows, HIDDEN), dtype, f"{name} x", 1)
            total = mlp_reference(np.concatenate(xs), shares)
            expected = np.split(total, self.world.size)[self._rank]
            arrays = (xs[self._rank],)
            yield self._case(name, operation, arrays, expected, dtype)

    def _moe(
        self, schedule: str, parallel: str, dtype: str = "bfloat16"
    ) -> Iterator[Case]:
        size, rank = self.world.size, self._rank
        inner = MOE_INNER * size if parallel == "tensor" else MOE_INNER
        shapes = {
            "router": ((EXPERTS, MOE_HIDDEN), MOE_HIDDEN),
            "gate_up": ((EXPERTS, 2 * inner, MOE_HIDDEN), MOE_HIDDEN),
            "down": ((EXPERTS, MOE_HIDDEN, inner), inner),
        }
        router, gate_up, down = weights = [
            draw(shape, dtype, f"moe {parallel} {name}", summed)
            for name, (shape, summed) in shapes.items()
        ]
        block = SparseBlock(router, gate_up, down, TOP_K, True)
        share = block.share(parallel, rank, size)
        own = map(self.put, (share.router, share.gate_up, share.down))
        operation = MoE(
            *own, top_k=TOP_K, parallel=parallel, world=self.world, schedule=schedule
        )
        for tokens in MOE_TOKENS:
            name = f"moe {parallel} {schedule} {tokens} tokens"
            xs = self._each((tokens, MOE_HIDDEN), dtype, f"{name} x", 1)
            x = np.concatenate(xs) if parallel == "tensor" else xs[rank]
            expected = moe_reference(xs[rank], *weights)
            yield self._case(name, operation, (x,), expected, dtype)

    def _case(
        self,
        name: str,
        operation: Any,
        arrays: tuple[Host, ...],
        expected: Host,
        dtype: str,
    ) -> Case:
        """Its first call is made here."""
        out = self.put(np.zeros(expected.shape, DTYPES[dtype]))
        call = partial(operation, *map(self.put, arrays), out)
        call()
        operation.synchronize()
        tolerance = LEEWAY * TOLERANCE[dtype]
        return Case(name, operation, call, out, out.copy(), expected, tolerance)

    @property
    def _rank(self) -> int:
        return self.world.rank

    def _each(
        self, shape: tuple[int, ...], dtype: str, name: str, summed: int
    ) -> list[Host]:
        """An input of each rank."""
        ranks = range(self.world.size)
        return [draw(shape, dtype, f"{name} of rank {r}", summed) for r in ranks]


def draw(shape: tuple[int, ...], dtype: str, name: str, summed: int) -> Host:
    """Normal numbers, other ones for each name; products of `summed` of them with
    others of deviation 1 keep a deviation of about 1."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    numbers = rng.standard_normal(shape, np.float32) * np.float32(summed**-0.5)
    return np.asarray(numbers.astype(DTYPES[dtype]))


def stored(w: Host, layout: str) -> Host:
    """w [N, K] as an operation of that layout takes it."""
    return w if layout == "nk" else np.ascontiguousarray(w.T)


def wide(array: Host) -> Host:
    return np.asarray(array.astype(np.float32))


def swiglu(gate: Host, up: Host, dtype: Any) -> Host:
    """The activations in fp32, rounded to the dtype as the layers do."""
    return wide((gate / (1 + np.exp(-gate)) * up).astype(dtype))


def mlp_reference(x: Host, shares: list[tuple[Host, Host, Host]]) -> Host:
    """The sum over the ranks' weights for all rows."""
    total = np.zeros(x.shape, np.float32)
    for gate, up, down in shares:
        active = swiglu(wide(x) @ wide(gate).T, wide(x) @ wide(up).T, x.dtype)
        total += active @ wide(down).T
    return total


def moe_reference(x: Host, router: Host, gate_up: Host, down: Host) -> Host:
    """The weighted sum over each token's TOP_K experts."""
    rows, inner = wide(x), down.shape[2]
    logits = rows.astype(np.float64) @ router.astype(np.float64).T
    chosen = np.argsort(-logits, axis=1, kind="stable")[:, :TOP_K]
    share = np.exp(logits - logits.max(axis=1, keepdims=True))
    picked = np.zeros_like(share)
    np.put_along_axis(picked, chosen, np.take_along_axis(share, chosen, 1), 1)
    weight = (picked / picked.sum(axis=1, keepdims=True)).astype(np.float32)
    total = np.zeros(x.shape, np.float32)
    for expert in range(EXPERTS):
        gate, up = np.split(rows @ wide(gate_up[expert]).T, [inner], axis=1)
        active = swiglu(gate, up, x.dtype)
        total += weight[:, expert, None] * (active @ wide(down[expert]).T)
    return total
