"""Measuring pairs of tiles of the MLP, where others are faster than the model's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from statistics import fmean
from typing import NamedTuple

from etc_dist.compiler import compile
from etc_dist.layers.mlp_policy import pair_key, rate_pairs
from etc_dist.layers.mlp_tiles import mlp_tiles_graph
from etc_dist.ops.matmul_policy import ROW_CLASSES, SHAPES
from etc_dist.ops.tune import LEAST_GAIN, CallTimer, gain_of
from etc_dist.ops.tuning import MeasuredPair, Tuning, parse
from etc_dist.world import World

BEST_PAIRS = 16
"""Pairs that are measured: the fastest ones by the model."""
MOST_KEPT = 4
"""Of these, those whose times are kept."""


class PairSample(NamedTuple):
    """An MLP for m rows of all ranks, on the tiles SHAPES[up] and SHAPES[down]."""

    m: int
    hidden: int
    inner: int
    up: int
    down: int


def mlp_sizes(sizes: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Hidden and inner size of the MLPs of which both matmuls are among `sizes`, pairs
    of N and K."""
    return [(k, n // 2) for n, k in sizes if n % 2 == 0 and (k, n // 2) in sizes]


def tune_pairs(
    measure: Callable[[Sequence[PairSample]], list[float]],
    made: Tuning,
    sizes: Sequence[tuple[int, int]],
    say: Callable[[str], object] = print,
) -> Tuning:
    """`made` with the pairs of tiles that `measure` finds to be faster than those that
    `made` chooses. `sizes`: pairs of hidden and inner size."""
    made = replace(made, pairs=())
    pairs = []
    for (hidden, inner), m in product(sizes, ROW_CLASSES):
        rated = rate_pairs(m, hidden, inner, made.workers, SHAPES, tuning=made)
        samples = [
            PairSample(m, hidden, inner, one.up.number, one.down.number)
            for one in rated[:BEST_PAIRS]
        ]
        found = measure(samples)
        if gain_of(found) > LEAST_GAIN:  # measured twice: one may be an accident
            again = zip(found, measure(samples), strict=True)
            found = [round(fmean(both), 2) for both in again]
        if gain_of(found) > LEAST_GAIN:
            fast = sorted((us, one) for us, one in zip(found, samples, strict=True))
            named = {
                pair_key(SHAPES[one.up], SHAPES[one.down]): us
                for us, one in fast[:MOST_KEPT]
                if us <= found[0]
            }
            pairs.append(MeasuredPair(m, hidden, inner, named))
            best = next(iter(named))
            say(f"{m} x {hidden} x {inner}: {best}, {found[0]} to {min(found)} us")
    every = len(sizes) * len(ROW_CLASSES)
    say(f"other pairs than the model's at {len(pairs)} of {every}")
    return replace(made, pairs=tuple(pairs))


def tune_mlp(
    world: World,
    made: Tuning,
    sizes: Sequence[tuple[int, int]],
    say: Callable[[str], object],
) -> Tuning:
    """`made` with measured pairs for the MLPs in `sizes`, pairs of N and K; the same
    result on all ranks. Collective."""
    pairs = mlp_sizes(sizes)
    if not pairs:
        return replace(made, pairs=())
    with compile(mlp_tiles_graph(world.size), world, trace=False) as program:
        most = max(ROW_CLASSES)
        elements = max(most * hidden + 3 * hidden * inner for hidden, inner in pairs)
        made = tune_pairs(PairTimer(world, program, elements), made, pairs, say)
    first = world.gather(made.document() if world.rank == 0 else None)[0]
    return parse(first, "rank 0", made.origin)


class PairTimer(CallTimer):
    """Times MLPs."""

    def _time(self, sample: PairSample) -> float:
        m, hidden, inner, up, down = sample
        rows = max(1, m // self._world.size)
        sizes = {"gate": (inner, hidden), "up": (inner, hidden)}
        sizes |= {"down": (hidden, inner), "x": (rows, hidden)}
        dims = {"gate_up_shape": up, "down_shape": down}
        return self.time_call(sizes, ("y", rows, hidden), dims)
