"""Races: two tasks access the same memory, one writes, and nothing orders them.

The accesses of a cell are sorted consistently with happens-before. It suffices to check
neighbours: each access with the write before it, each read with the write after it.
The relation is transitive, so if all neighbours are ordered, all pairs are; neighbours
that are not ordered are a race. The cost of a cell is linear in its accesses."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from etc_dist.errors import GraphError, RaceError
from etc_dist.verify.cells import Cells
from etc_dist.verify.enumeration import PARTLY_WAITED, Array, Enumeration, Mask
from etc_dist.verify.happens_before import HappensBefore
from etc_dist.verify.violations import Fault, Tally

MOST_SUSPECTS = 2**22
"""Pairs of accesses that are kept for one search: a limit on its memory."""
Pairs = tuple[Cells, Array, Array]
"""Entries of a tensor's cells, the first of each pair and the second."""


class Races:
    """Collects the pairs that no single step orders, over all tensors, to search for
    chains of steps once."""

    def __init__(self, tasks: Enumeration, order: HappensBefore):
        self.tasks, self.order, self.node = tasks, order, order.node
        self.suspects: list[Pairs] = []
        self._count, self._most = 0, MOST_SUSPECTS
        self.unwritten: list[Pairs] = []

    def check(self, cells: Cells, complete: bool) -> None:
        """Collect from a tensor's cells; `complete`: all writes are known."""
        before, after, unwritten = _neighbours(cells)
        for first, second in (before, after):
            early = _is_early(cells, first, second)
            direct = self.order.direct(
                self.node[cells.task[first]], self.node[cells.task[second]], early
            )
            loose = np.flatnonzero(~direct)
            if loose.size:
                self.suspects.append((cells, first[loose], second[loose]))
                self._count += loose.size
        if self._count > self._most:
            self._drop_ordered()
        if complete and not cells.tensor.is_given and unwritten[0].size:
            read, write = unwritten
            # A gather need not read what a later turn is the first to write.
            later = self.tasks.is_later_turn(cells.task[read], cells.task[write])
            is_needed = ~(cells.gathered[read] & later)
            self.unwritten.append((cells, read[is_needed], write[is_needed]))

    def add_to(self, tally: Tally) -> None:
        """Count all races that were found."""
        for cells, first, second, is_ordered in self._searched(self.suspects):
            self._add_races(cells, first[~is_ordered], second[~is_ordered], tally)
        for cells, first, second, is_ordered in self._searched(self.unwritten):
            self._add_unwritten(cells, first[is_ordered], second[is_ordered], tally)

    def _drop_ordered(self) -> None:
        """Drop pairs that are quickly found to be ordered."""
        first = np.concatenate([cells.task[a] for cells, a, _ in self.suspects])
        second = np.concatenate([cells.task[b] for cells, _, b in self.suspects])
        loose = np.concatenate([_is_early(*pairs) for pairs in self.suspects])
        loose |= ~self.order.search_events(self.node[first], self.node[second])
        suspects, begin = [], 0
        for cells, a, b in self.suspects:
            is_loose = loose[begin : begin + a.size]
            begin += a.size
            if is_loose.any():
                suspects.append((cells, a[is_loose], b[is_loose]))
        self.suspects, self._count = suspects, int(loose.sum())
        self._most = max(MOST_SUSPECTS, 2 * self._count)

    def _searched(self, pairs: list[Pairs]) -> Iterator[tuple[*Pairs, Mask]]:
        """The pairs, with a mask of those that a chain of steps orders."""
        if not pairs:
            return
        first = self.node[np.concatenate([cells.task[a] for cells, a, _ in pairs])]
        second = self.node[np.concatenate([cells.task[b] for cells, _, b in pairs])]
        early = np.concatenate([_is_early(cells, a, b) for cells, a, b in pairs])
        count = self.order.level.size
        pair_keys = (first * count + second) * 2 + early
        unique_keys, where = np.unique(pair_keys, return_inverse=True)
        pair = np.divmod(unique_keys // 2, count)
        is_ordered = self.order.search(*pair, unique_keys % 2 == 1)[where]
        begin = 0
        for cells, a, b in pairs:
            yield cells, a, b, is_ordered[begin : begin + a.size]
            begin += a.size

    def _add_races(
        self, cells: Cells, first: Array, second: Array, tally: Tally
    ) -> None:
        """One fault for each pair of calls that race on the tensor."""
        bases = [b.base for b in self.tasks.blocks]
        names = [b.call.name for b in self.tasks.blocks]
        one_block, two_block = (
            np.searchsorted(bases, cells.task[entry], side="right") - 1
            for entry in (first, second)
        )
        kinds, example, count = np.unique(
            one_block * len(bases) + two_block, return_index=True, return_counts=True
        )
        for kind, n, times in zip(kinds, example, count, strict=True):
            a, b = divmod(int(kind), len(bases))
            first_access, second_access = (
                self._does(cells, int(entry[n])) for entry in (first, second)
            )
            text = f"{first_access} and {second_access} "
            text += f"{cells.name(int(cells.cell[first[n]]))}; no event orders them"
            fix = "order them by an event: notify it after one access, wait for it "
            fix += "before the other"
            fault = Fault(RaceError, text, fix, int(times))
            pair = tuple(sorted((names[a], names[b])))
            tally.add(("race", cells.tensor.name, pair), fault)

    def _does(self, cells: Cells, entry: int) -> str:
        return f"{self.tasks.name(int(cells.task[entry]))} {cells.verb(entry)}"

    def _add_unwritten(
        self, cells: Cells, read: Array, write: Array, tally: Tally
    ) -> None:
        if not read.size:
            return
        writer = int(cells.task[write[0]])
        text = (
            f"{self._does(cells, int(read[0]))} {cells.name(int(cells.cell[read[0]]))} "
            f"before {self.tasks.name(writer)}, the first to write it"
        )
        fix = "wait for the writer in the reader"
        fault = Fault(GraphError, text, fix, int(read.size))
        tally.add(("unwritten yet", cells.tensor.name), fault)


def _is_early(cells: Cells, first: Array, second: Array) -> Mask:
    """Pairs of which the second access may come before some waits of its task: after a
    write. What comes after a read is a write, which no task makes that early."""
    phase = cells.phase[second]
    is_early: Mask = np.logical_or.reduce([phase == p for p in PARTLY_WAITED])
    return cells.write[first] & is_early


def reads_before_writes(cells: Cells) -> tuple[Array, Array]:
    """Pairs of entries: a read, and the next write of its cell."""
    return _neighbours(cells)[1]


def _neighbours(
    cells: Cells,
) -> tuple[tuple[Array, Array], tuple[Array, Array], tuple[Array, Array]]:
    """Pairs of entries: (the write before, an access), (a read, the write after), and
    those of the latter whose read precedes every write of its cell."""
    count = cells.cell.size
    entry = np.arange(count)
    last = np.full(count, -1)
    last[1:] = np.maximum.accumulate(np.where(cells.write, entry, -1))[:-1]
    following = np.full(count, -1)
    ahead = np.minimum.accumulate(np.where(cells.write, entry, count)[::-1])[::-1]
    following[:-1] = np.where(ahead[1:] < count, ahead[1:], -1)
    has_last, has_next = (
        (neighbour >= 0) & (cells.cell[neighbour] == cells.cell)
        for neighbour in (last, following)
    )
    has_next &= ~cells.write
    unwritten = has_next & ~has_last
    return (
        (last[has_last], entry[has_last]),
        (entry[has_next], following[has_next]),
        (entry[unwritten], following[unwritten]),
    )
