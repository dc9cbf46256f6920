"""The choice of the MLP's two tile shapes, as a pair: their times alone do not add up.

A matmul after one on other tiles waits for its code, which no instruction cache holds.
Down reads its activations only after the last of them is written, so tiles that read
much of them take longer than alone: only measured pairs account for that. And if only
one of the two multicasts, the workers of a pair wait for each other in both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import NamedTuple

from etc_dist.functions.tile_matmul import TileShape
from etc_dist.ops.matmul_policy import (
    Rating,
    Sizes,
    explain,
    has_blocks,
    nearest,
    rate,
    waves_of,
)
from etc_dist.ops.tuning import JOINED, MeasuredPair, Tuning
from etc_dist.schedule.plan import Choice

SWITCH_US = 2.0
"""Added to the time of a pair of two different tile shapes: the fetch of the second
one's code. Measured on an H200 only."""
MOST_SLOWER = 1.15
"""Measured pairs serve a size only if the fastest of them takes, as measured or by the
model, at most so many times as long as the model's fastest pair. Their times also serve
fewer rows (see ROW_CLASSES), for which others may be much faster."""


class Pair(NamedTuple):
    """The ratings of gate_up's and down's tiles, and the time of both. measured: the
    sizes at which it was measured; None if it is predicted."""

    up: Rating
    down: Rating
    us: float
    measured: MeasuredPair | None = None


def sizes_of(m: int, hidden: int, inner: int) -> tuple[Sizes, Sizes]:
    """M, N and K of gate_up and of down."""
    return (m, 2 * inner, hidden), (m, hidden, inner)


def pair_key(up: TileShape, down: TileShape) -> str:
    """The name of a pair of tile shapes in a tuning."""
    return JOINED.join((up.key, down.key))


def rate_pairs(
    m: int,
    hidden: int,
    inner: int,
    workers: int,
    shapes: Sequence[TileShape],
    *,
    world_size: int = 1,
    in_order: bool = False,
    tuning: Tuning,
) -> list[Pair]:
    """The pairs to choose from for m rows of all ranks: first measured ones, then those
    of which most matmuls have a measured time, then the rest, each group the fastest
    first."""
    in_blocks = has_blocks(m, world_size)
    first, second = sizes_of(m, hidden, inner)
    ups, downs = (
        rate(
            *(*sizes, workers, shapes),
            gated=gated,
            in_order=in_order,
            in_blocks=in_blocks,
            tuning=tuning,
        )
        for sizes, gated in ((first, True), (second, False))
    )
    found = combined(ups, downs, shapes)
    allowed = {(one.up.number, one.down.number): one for one in found}
    most = MOST_SLOWER * min(one.us for one in found)
    by_key = {shape.key: number for number, shape in enumerate(shapes)}

    def numbers(key: str) -> tuple[int | None, ...]:
        """The positions in `shapes` of the tiles of a measured pair."""
        return tuple(map(by_key.get, key.split(JOINED)))

    def timed(one: MeasuredPair) -> list[tuple[float, Pair]]:
        """Its times of pairs to choose from, and these pairs as predicted."""
        return [
            (us, allowed[pair])
            for key, us in one.us.items()
            if (pair := numbers(key)) in allowed
        ]

    def serves(one: MeasuredPair) -> bool:
        """Whether its fastest pair here is about as fast as the model's, and all tiles
        have as many waves as when they were measured, on one rank."""
        there = sizes_of(one.m, one.hidden, one.inner)
        times = [(us, pair.us) for us, pair in timed(one)]
        if not times or min(min(times)) > most:  # both times of the fastest one
            return False
        return all(
            waves_of(shapes[number], here, workers, in_blocks)
            == waves_of(shapes[number], at, workers, has_blocks(one.m, 1))
            for pair in map(numbers, one.us)
            for number, here, at in zip(pair, (first, second), there, strict=True)
            if number is not None
        )

    near = nearest(
        tuning.pairs if workers == tuning.workers else (),
        m,
        (hidden, inner),
        lambda one: (one.hidden, one.inner),
        serves,
    )
    if near is None:
        return found
    known = [pair._replace(us=us, measured=near) for us, pair in timed(near)]
    return sorted(known, key=lambda one: one.us) + found


def combined(
    ups: Sequence[Rating], downs: Sequence[Rating], shapes: Sequence[TileShape]
) -> list[Pair]:
    """Pairs of the tiles of two matmuls, one after the other: first those of which most
    matmuls have a measured time, then the rest, each group the fastest first. Without
    those of which only one multicasts, if there are others."""
    every = [
        Pair(up, down, up.us + down.us + SWITCH_US * (up.number != down.number))
        for up, down in product(ups, downs)
    ]
    found = [
        one
        for one in every
        if shapes[one.up.number].multicasts == shapes[one.down.number].multicasts
    ] or every
    most = max(map(_measured_parts, found))
    return sorted(found, key=lambda one: (_measured_parts(one) < most, one.us))


def _measured_parts(pair: Pair) -> int:
    """How many of the two matmuls have a measured time."""
    return (pair.up.measured is not None) + (pair.down.measured is not None)


def choose_shapes(
    dims: Mapping[str, int],
    world_size: int,
    workers: int,
    shapes: Sequence[TileShape],
    *,
    in_order: bool = False,
    tuning: Tuning,
) -> list[Choice]:
    """The dims that select the tile shapes of a call."""
    tokens, hidden, inner = world_size * dims["rows"], dims["hidden"], dims["inner"]
    pairs = rate_pairs(
        *(tokens, hidden, inner, workers, shapes),
        world_size=world_size,
        in_order=in_order,
        tuning=tuning,
    )
    best, in_blocks = pairs[0], has_blocks(tokens, world_size)
    sizes = sizes_of(tokens, hidden, inner)

    def reasons(own: int, text: str) -> Callable[[], list[str]]:
        def explained() -> list[str]:
            found = [(pair.up, pair.down)[own] for pair in pairs]
            by_number = {one.number: one for one in reversed(found)}
            chosen = by_number.pop(found[0].number)
            ratings = [chosen, *sorted(by_number.values(), key=lambda one: one.us)]
            lines = explain(sizes[own], workers, shapes, ratings, tuning, in_blocks)
            return [lines[0], f"  {text}: {_time(best)}", *lines[1:]]

        return explained

    up, down = best.up.number, best.down.number
    return [
        Choice("gate_up_shape", up, reasons(0, f"with down on {shapes[down]}")),
        Choice("down_shape", down, reasons(1, f"after gate_up on {shapes[up]}")),
    ]


def _time(pair: Pair) -> str:
    if pair.measured is None:
        return f"{pair.us:.1f} us together, predicted"
    at = pair.measured
    return f"{pair.us:.1f} us together, measured at {at.m} x {at.hidden} x {at.inner}"
