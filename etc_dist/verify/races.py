"""Races: two tasks touch the same memory, one writes, and nothing orders them.

In a cell, accesses stand in a line that agrees with happens-before. If neighbours are
ordered (each access and the write before it, each read and the write after it), then
all are, for the order is transitive; and neighbours that are not are a race. So a cell
costs as many checks as it has accesses, not as it has pairs of them.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from etc_dist.errors import GraphError, RaceError
from etc_dist.verify.cells import Cells
from etc_dist.verify.enumeration import EARLY, WAITING, Array, Enumeration, Mask
from etc_dist.verify.happens_before import HappensBefore
from etc_dist.verify.violations import Fault, Tally

SOON = (WAITING, EARLY)
"""Moments at which not all of a task's waits are met."""
Pairs = tuple[Cells, Array, Array]
"""Entries of a tensor's cells, the first of each pair and the second."""


class Races:
    """Gathers pairs that no single step orders, tensor by tensor, to search a chain of
    steps for all of them at once."""

    def __init__(self, tasks: Enumeration, order: HappensBefore):
        self.tasks, self.order = tasks, order
        self.suspects: list[Pairs] = []
        self.early: list[Pairs] = []

    def check(self, cells: Cells, complete: bool) -> None:
        """Look at a tensor's cells; `complete`: all that is written is known."""
        before, after, early = _neighbours(cells)
        for first, second in (before, after):
            soon = np.isin(cells.moment[second], SOON)
            direct = self.order.direct(cells.task[first], cells.task[second], soon)
            loose = np.flatnonzero(~direct)
            if loose.size:
                self.suspects.append((cells, first[loose], second[loose]))
        if cells.tensor.kind != "input" and complete and early[0].size:
            self.early.append((cells, *early))

    def faults(self) -> list[Fault]:
        tally = Tally()
        for cells, first, second, ordered in self._searched(self.suspects):
            self._tell_races(cells, first[~ordered], second[~ordered], tally)
        for cells, first, second, ordered in self._searched(self.early):
            self._tell_early(cells, first[ordered], second[ordered], tally)
        return tally.faults()

    def _searched(self, pairs: list[Pairs]) -> Iterator[tuple[*Pairs, Mask]]:
        """The pairs, each with whether a chain of steps orders it."""
        if not pairs:
            return
        first = np.concatenate([cells.task[a] for cells, a, _ in pairs])
        second = np.concatenate([cells.task[b] for cells, _, b in pairs])
        soon = np.concatenate([np.isin(c.moment[b], SOON) for c, _, b in pairs])
        both = (first * self.tasks.tasks + second) * 2 + soon
        each, where = np.unique(both, return_inverse=True)
        pair = np.divmod(each // 2, self.tasks.tasks)
        ordered = self.order.search(*pair, each % 2 == 1)[where]
        begin = 0
        for cells, a, b in pairs:
            yield cells, a, b, ordered[begin : begin + a.size]
            begin += a.size

    def _tell_races(
        self, cells: Cells, first: Array, second: Array, tally: Tally
    ) -> None:
        """One fault for each pair of calls that race on the tensor."""
        bases = [b.base for b in self.tasks.blocks]
        names = [b.call.name for b in self.tasks.blocks]
        blocks = np.stack(
            [
                np.searchsorted(bases, cells.task[entry], side="right") - 1
                for entry in (first, second)
            ]
        )
        kinds, example, count = np.unique(
            blocks, axis=1, return_index=True, return_counts=True
        )
        for (a, b), n, times in zip(kinds.T, example, count, strict=True):
            one, two = (self._does(cells, int(entry[n])) for entry in (first, second))
            text = f"{one} and {two} {cells.name(int(cells.cell[first[n]]))}"
            text += "; no event orders them"
            fix = "let one notify an event, after its access, that the other waits for"
            fault = Fault(RaceError, text, fix, int(times))
            pair = tuple(sorted((names[a], names[b])))
            tally.add(("race", cells.tensor.name, pair), fault)

    def _does(self, cells: Cells, entry: int) -> str:
        return f"{self.tasks.name(int(cells.task[entry]))} {cells.verb(entry)}"

    def _tell_early(
        self, cells: Cells, read: Array, write: Array, tally: Tally
    ) -> None:
        if not read.size:
            return
        writer = int(cells.task[write[0]])
        text = (
            f"{self._does(cells, int(read[0]))} {cells.name(int(cells.cell[read[0]]))} "
            f"before {self.tasks.name(writer)}, the first to write it"
        )
        fix = "let the reader wait for the writer"
        fault = Fault(GraphError, text, fix, int(read.size))
        tally.add(("early", cells.tensor.name), fault)


def _neighbours(
    cells: Cells,
) -> tuple[tuple[Array, Array], tuple[Array, Array], tuple[Array, Array]]:
    """Pairs of entries: (the write before, an access), (a read, the write after), and
    those of the latter whose read comes before every write of its cell."""
    count = cells.cell.size
    entry = np.arange(count)
    last = np.full(count, -1)
    last[1:] = np.maximum.accumulate(np.where(cells.write, entry, -1))[:-1]
    following = np.full(count, -1)
    ahead = np.minimum.accumulate(np.where(cells.write, entry, count)[::-1])[::-1]
    following[:-1] = np.where(ahead[1:] < count, ahead[1:], -1)
    has_last, has_next = (
        (other >= 0) & (cells.cell[other] == cells.cell) for other in (last, following)
    )
    has_next &= ~cells.write
    early = has_next & ~has_last
    return (
        (last[has_last], entry[has_last]),
        (entry[has_next], following[has_next]),
        (entry[early], following[early]),
    )
