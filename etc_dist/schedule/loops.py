"""Loops of a lane: its calls as a tree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from etc_dist.ir.call import Call, Coordinate


@dataclass(frozen=True)
class Loop:
    """Calls and loops that a lane takes turn by turn: in each turn, the units of the
    first item, then those of the second, and so on."""

    axis: Coordinate
    items: tuple[Item, ...]

    @property
    def name(self) -> str:
        """The name of its coordinate."""
        return self.axis.symbol.name


Item = Call | Loop


def nest(calls: Sequence[Call], depth: int = 0) -> tuple[Item, ...]:
    """`calls`, which are in `depth` loops, in the loops inside of these."""

    def loop(call: Call) -> Coordinate | None:
        return call.loop_axes[depth] if depth < call.loops else None

    items: list[Item] = []
    for axis, members in groupby(calls, loop):
        inside = tuple(members)
        items += inside if axis is None else [Loop(axis, nest(inside, depth + 1))]
    return tuple(items)


def loops_in(items: Sequence[Item]) -> Iterator[Loop]:
    """All loops in `items`, outer ones first."""
    for item in items:
        if isinstance(item, Loop):
            yield item
            yield from loops_in(item.items)
