"""Which task surely ends before which begins: by an event, by program order, or by a
chain of these."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from etc_dist.verify.enumeration import NONE, Array, Enumeration, Mask

WORD = 64
BUDGET = 2**24
"""Words of the bit sets that one pass of the search may hold: 128 MB."""


@dataclass(frozen=True)
class HappensBefore:
    """The order of all tasks, given the round in which each one ran.

    A task that waits for an element comes after all that notify it, for it waits for
    all of them. A strided lane's tasks that one worker runs alone follow that worker's
    sequence. Tasks that a cluster runs together are ordered by events only, since their
    loads run ahead; ticket and queue lanes order nothing. `level` rises along every
    such step."""

    tasks: Enumeration
    level: Array

    def direct(self, first: Array, second: Array, soon: Mask) -> Mask:
        """Pairs ordered by one step: one event, or one cluster's sequence. Where
        `soon`, the first task must end before the second one loads to know what else it
        waits for, or reads early."""
        return self._by_event(first, second, soon) | self._by_program(first, second)

    def _by_event(self, first: Array, second: Array, soon: Mask) -> Mask:
        found = np.zeros(first.shape, bool)
        for notified in self.tasks.notify.T:
            left = notified[first]
            for awaited, free in zip(
                self.tasks.wait.T, self.tasks.free_wait.T, strict=True
            ):
                right = np.where(soon, free[second], awaited[second])
                found |= (left == right) & (left != NONE)
        return found

    def _by_program(self, first: Array, second: Array) -> Mask:
        q = self.tasks.queues
        same: Mask = q.strided[first] & q.strided[second]
        same &= q.queue[first] == q.queue[second]
        same &= q.position[first] < q.position[second]
        same &= q.whole[first] | q.whole[second] | (q.slot[first] == q.slot[second])
        return same

    def search(self, first: Array, second: Array, soon: Mask) -> Mask:
        """Pairs ordered by a chain of steps: exact, for the few that are not direct."""
        found = np.zeros(first.shape, bool)
        sources, source = np.unique(first, return_inverse=True)
        width = WORD * max(1, min(WORD, BUDGET // max(1, self.tasks.tasks)))
        previous = self._previous()
        steps = self._steps()
        for start in range(0, sources.size, width):
            batch = sources[start : start + width]
            reached, met = self._reached(batch, previous, steps)
            pairs = np.flatnonzero((source >= start) & (source < start + width))
            bit = source[pairs] - start
            words = reached[second[pairs], bit // WORD]
            few = np.flatnonzero(soon[pairs])
            if few.size:
                at, word = second[pairs[few]], bit[few] // WORD
                words[few] = 0
                for before in previous:
                    words[few] |= reached[before[at], word]
                for awaited in self.tasks.free_wait.T:
                    words[few] |= met[awaited[at], word]
            found[pairs] = (words >> (bit % WORD).astype(np.uint64)) & np.uint64(1) != 0
        return found

    def _steps(self) -> list[Array]:
        """The tasks, level by level."""
        order = np.argsort(self.level, kind="stable")
        cuts = np.flatnonzero(np.diff(self.level[order])) + 1
        return np.split(order, cuts)

    def _previous(self) -> Array:
        """[worker of the cluster, task] -> the task it runs before this one."""
        q = self.tasks.queues
        workers = max((lane.cluster for lane in self.tasks.plan.lanes), default=1)
        previous = np.full((workers, self.tasks.tasks), NONE)
        for worker in range(workers):
            mine = np.flatnonzero(q.strided & (q.whole | (q.slot == worker)))
            mine = mine[np.lexsort((q.position[mine], q.queue[mine]))]
            same = q.queue[mine[1:]] == q.queue[mine[:-1]]
            previous[worker, mine[1:]] = np.where(same, mine[:-1], NONE)
        return previous

    def _reached(
        self, sources: Array, previous: Array, steps: list[Array]
    ) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
        """[task, word]: bit b is set for tasks that are, or come after, sources[b]; and
        [element, word]: for elements that such tasks notify."""
        words = -(-sources.size // WORD)
        # NOTE: the last row stays zero: NONE, as an index, means nobody.
        tasks = np.zeros((self.tasks.tasks + 1, words), np.uint64)
        elements = np.zeros((self.tasks.elements.total + 1, words), np.uint64)
        bit = np.arange(sources.size)
        tasks[sources, bit // WORD] = np.uint64(1) << (bit % WORD).astype(np.uint64)
        for step in steps:
            mine = tasks[step]
            for before in previous:
                mine |= tasks[before[step]]
            for awaited in self.tasks.wait.T:
                mine |= elements[awaited[step]]
            tasks[step] = mine
            for notified in self.tasks.notify.T:
                _merge(elements, notified[step], mine)
        return tasks, elements


def _merge(
    elements: npt.NDArray[np.uint64], target: Array, bits: npt.NDArray[np.uint64]
) -> None:
    """elements[target] |= bits, also where a target occurs more than once."""
    some = np.flatnonzero(target != NONE)
    if not some.size:
        return
    some = some[np.argsort(target[some], kind="stable")]
    ordered = target[some]
    starts = np.flatnonzero(np.diff(ordered, prepend=NONE))
    elements[ordered[starts]] |= np.bitwise_or.reduceat(bits[some], starts, axis=0)


def order_tasks(tasks: Enumeration, rounds: Array) -> HappensBefore:
    """The order of `tasks`, each of which ran in one of `rounds`."""
    position = np.where(tasks.queues.strided, tasks.queues.position, 0)
    deepest = int(position.max(initial=0)) + 1
    return HappensBefore(tasks, rounds * deepest + position)
