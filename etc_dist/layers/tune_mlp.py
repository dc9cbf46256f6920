"""Measuring pairs of tiles of the MLP, where others are faster than the model's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from etc_dist.compiler import compile
from etc_dist.layers.mlp_policy import pair_key, rate_pairs
from etc_dist.layers.mlp_tiles import mlp_tiles_graph
from etc_dist.ops.matmul_policy import ROW_CLASSES, SHAPES
from etc_dist.ops.tune import CallTimer, confirm, shown
from etc_dist.ops.tuning import MeasuredPair, Tuning
from etc_dist.world import World

BEST_PAIRS = 16
"""Pairs that are measured: the fastest ones by the model."""
MOST_KEPT = 4
"""The most pairs of one size whose times are kept."""


class PairSample(NamedTuple):
    """An MLP for m rows, on the tiles SHAPES[up] and SHAPES[down]."""

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
    """`made` with the pairs of tiles that `measure` finds to be faster than the model's
    at these `sizes`, pairs of hidden and inner size. At others it keeps its own."""
    others = [one for one in made.pairs if (one.hidden, one.inner) not in sizes]
    made, pairs = replace(made, pairs=()), []
    for (hidden, inner), m in product(sizes, ROW_CLASSES):
        rated = rate_pairs(m, hidden, inner, made.workers, SHAPES, tuning=made)
        samples = [
            PairSample(m, hidden, inner, one.up.number, one.down.number)
            for one in rated[:BEST_PAIRS]
        ]
        fast = confirm(measure, samples, measure(samples))
        if fast:
            named = {
                pair_key(SHAPES[one.up], SHAPES[one.down]): us
                for us, one in fast[:MOST_KEPT]
            }
            pairs.append(MeasuredPair(m, hidden, inner, named))
            say(f"{m} x {hidden} x {inner}: {shown(fast, named)}")
    every = len(sizes) * len(ROW_CLASSES)
    say(f"other pairs than the model's at {len(pairs)} of {every}")
    return replace(made, pairs=(*pairs, *others))


def tune_mlp(
    world: World,
    made: Tuning,
    sizes: Sequence[tuple[int, int]],
    say: Callable[[str], object],
) -> Tuning:
    """`made` with measured pairs for the MLPs in `sizes`, pairs of N and K. Only on one
    rank: on several, the time of communication would be part of the times."""
    mlps = mlp_sizes(sizes)
    if mlps and world.size > 1:
        say("pairs of tiles of the MLP are measured on one rank only")
    if not mlps or world.size > 1:
        return made
    with compile(mlp_tiles_graph(1), world, trace=False) as program:
        most = max(ROW_CLASSES)
        elements = max(most * hidden + 3 * hidden * inner for hidden, inner in mlps)
        return tune_pairs(MlpTimer(world, program, elements), made, mlps, say)


class MlpTimer(CallTimer):
    """Times MLPs on one rank."""

    def _time(self, sample: PairSample) -> float:
        rows, hidden, inner, up, down = sample
        sizes = {"gate": (inner, hidden), "up": (inner, hidden)}
        sizes |= {"down": (hidden, inner), "x": (rows, hidden)}
        dims = {"gate_up_shape": up, "down_shape": down}
        return self.time_call(sizes, ("y", rows, hidden), dims)
