"""The happens-before relation of tasks: by an event, by program order, or by a chain
of both."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from etc_dist.verify.enumeration import NONE, Array, Enumeration, Mask, Queues
from etc_dist.verify.equal_rows import first_rows, row_numbers
from etc_dist.verify.task_classes import task_classes

WORD = 64
BUDGET = 2**24
"""Words of the bit sets in one pass of the search: 128 MB."""


@dataclass(frozen=True)
class HappensBefore:
    """The happens-before relation of all tasks.

    A task that waits for an element is ordered after all tasks that notify it. Tasks
    of a strided lane that a worker runs alone are ordered by the worker's sequence.
    All others are ordered by events only: tasks of ticket and queue lanes run
    concurrently.

    The nodes are classes of tasks: `node` has that of each task, the tables have a row
    for each node. `level` is a topological order: it rises along every ordered step.
    Without `queues`, events alone order nodes."""

    node: Array
    level: Array
    wait: Array
    free_wait: Array
    notify: Array
    elements: int
    queues: Queues | None = None

    def after_all(self, nodes: Array, *, early: bool) -> Mask:
        """Of each node: whether it waits for an element that all of `nodes` notify.
        early: by one of its first waits."""
        waits = self.free_wait if early else self.wait
        is_after = np.zeros(self.level.size, bool)
        for element in self.notify[nodes[0]]:
            if element != NONE and (self.notify[nodes] == element).any(axis=1).all():
                is_after |= (waits == element).any(axis=1)
        return is_after

    def direct(self, first: Array, second: Array, early: Mask) -> Mask:
        """Pairs ordered by one step: one event, or one worker's sequence. `early`: the
        second task's access precedes some of its waits (`PARTLY_WAITED`)."""
        return self._by_event(first, second, early) | self._by_program(first, second)

    def _by_event(self, first: Array, second: Array, early: Mask) -> Mask:
        is_ordered = np.zeros(first.shape, bool)
        waits = [wait_column[second] for wait_column in self.wait.T]
        if early.any():
            free = (wait_column[second] for wait_column in self.free_wait.T)
            pairs = zip(free, waits, strict=True)
            waits = [np.where(early, some, every) for some, every in pairs]
        for notify_column in self.notify.T:
            elements = notify_column[first]
            is_notified = elements != NONE
            for wait_column in waits:
                is_ordered |= (elements == wait_column) & is_notified
        return is_ordered

    def _by_program(self, first: Array, second: Array) -> Mask:
        q = self.queues
        if q is None:
            return np.zeros(first.shape, bool)
        same: Mask = q.strided[first] & q.strided[second]
        same &= q.queue[first] == q.queue[second]
        same &= q.position[first] < q.position[second]
        return same

    def search(self, first: Array, second: Array, early: Mask) -> Mask:
        """Pairs ordered by a chain of steps. Exact, for the few that are not direct."""
        is_after = np.zeros(first.shape, bool)
        # By level: the chains of a batch then lie within few levels.
        by_level = np.lexsort((first, self.level[first]))
        is_new = np.diff(first[by_level], prepend=NONE) != 0
        sources, source = first[by_level][is_new], np.cumsum(is_new) - 1
        width = WORD * max(1, min(WORD, BUDGET // max(1, self.level.size)))
        previous = self._previous()
        steps, levels = self._steps()
        for start in range(0, sources.size, width):
            batch = sources[start : start + width]
            begin, end = np.searchsorted(source, (start, start + width))
            pairs = by_level[begin:end]
            low, high = self.level[batch[0]], self.level[second[pairs]].max()
            here = slice(*np.searchsorted(levels, (low, high + 1)))
            node_bits, element_bits = self._reached(batch, previous, steps[here])
            bit = source[begin:end] - start
            words = node_bits[second[pairs], bit // WORD]
            few = np.flatnonzero(early[pairs])
            if few.size:
                at, word = second[pairs[few]], bit[few] // WORD
                words[few] = 0
                for before in previous:
                    words[few] |= node_bits[before[at], word]
                for wait_column in self.free_wait.T:
                    words[few] |= element_bits[wait_column[at], word]
            words >>= (bit % WORD).astype(np.uint64)
            is_after[pairs] = words & np.uint64(1) != 0
        is_after &= first != second
        return is_after

    @cached_property
    def _alike(self) -> tuple[Array, Array]:
        """For each node, its equivalence class by the elements that it notifies, and
        by those that it waits for."""
        alike = np.zeros_like(self.level)  # a column, as there may be no other
        return row_numbers((alike, *self.notify.T)), row_numbers((alike, *self.wait.T))

    def search_events(self, first: Array, second: Array) -> Mask:
        """Pairs ordered by a chain of steps that begins and ends with an event. Such an
        order depends only on the elements that the first task notifies and those that
        the second waits for, so one pair of each equivalence class is searched."""
        notifies, waits = self._alike
        kinds = notifies[first] * (int(waits.max(initial=0)) + 1) + waits[second]
        _, examples, kind = np.unique(kinds, return_index=True, return_inverse=True)
        first, second = first[examples], second[examples]
        is_ordered = np.zeros(first.shape, bool)
        by_level = np.argsort(self.level[first], kind="stable")
        width = WORD * max(1, min(WORD, BUDGET // max(1, self.level.size)))
        previous = self._previous()
        steps, levels = self._steps()
        for start in range(0, first.size, width):
            pairs = by_level[start : start + width]
            low, high = self.level[first[pairs[0]]], self.level[second[pairs]].max()
            here = slice(*np.searchsorted(levels, (low, high + 1)))
            _, element_bits = self._reached(
                first[pairs], previous, steps[here], is_by_event=True
            )
            bit = np.arange(pairs.size)
            words = np.zeros(pairs.size, np.uint64)
            for wait_column in self.wait.T:
                words |= element_bits[wait_column[second[pairs]], bit // WORD]
            words >>= (bit % WORD).astype(np.uint64)
            is_ordered[pairs] = words & np.uint64(1) != 0
        return is_ordered[kind]

    def _steps(self) -> tuple[list[Array], Array]:
        """The nodes, level by level, and the levels."""
        order = np.argsort(self.level, kind="stable")
        cuts = np.flatnonzero(np.diff(self.level[order])) + 1
        levels = self.level[order][np.concatenate(([0], cuts))]
        return np.split(order, cuts), levels

    def _previous(self) -> Array:
        """[1 or 0, node] -> the previous node of its worker."""
        q = self.queues
        if q is None:
            return np.zeros((0, self.level.size), np.int64)
        previous = np.full((1, self.level.size), NONE)
        tasks = np.flatnonzero(q.strided)
        tasks = tasks[np.lexsort((q.position[tasks], q.queue[tasks]))]
        is_same_queue = q.queue[tasks[1:]] == q.queue[tasks[:-1]]
        previous[0, tasks[1:]] = np.where(is_same_queue, tasks[:-1], NONE)
        return previous

    def _reached(
        self,
        sources: Array,
        previous: Array,
        steps: list[Array],
        *,
        is_by_event: bool = False,
    ) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
        """[node, word]: bit b is set for sources[b] and all nodes of `steps` after it;
        and [element, word]: for the elements that these nodes notify. is_by_event: only
        for nodes that an event of sources[b] orders after it."""
        words = -(-sources.size // WORD)
        # NOTE: the last row stays zero: NONE, as an index, selects it.
        nodes = np.zeros((self.level.size + 1, words), np.uint64)
        elements = np.zeros((self.elements + 1, words), np.uint64)
        bit = np.arange(sources.size)
        source_bits = np.zeros((sources.size, words), np.uint64)
        source_bits[bit, bit // WORD] = np.uint64(1) << (bit % WORD).astype(np.uint64)
        if is_by_event:
            for notify_column in self.notify.T:
                _merge(elements, notify_column[sources], source_bits)
        else:
            np.bitwise_or.at(nodes, sources, source_bits)
        for step in steps:
            step_bits = nodes[step]
            for before in previous:
                step_bits |= nodes[before[step]]
            for wait_column in self.wait.T:
                step_bits |= elements[wait_column[step]]
            nodes[step] = step_bits
            for notify_column in self.notify.T:
                _merge(elements, notify_column[step], step_bits)
        return nodes, elements


def _merge(
    elements: npt.NDArray[np.uint64], target: Array, bits: npt.NDArray[np.uint64]
) -> None:
    """elements[target] |= bits; a target may occur more than once."""
    some = np.argsort(target, kind="stable")
    elements_of_bits = target[some]
    is_new = elements_of_bits != NONE
    is_new[1:] &= elements_of_bits[1:] != elements_of_bits[:-1]
    starts = is_new.nonzero()[0]
    if starts.size:
        unions = np.bitwise_or.reduceat(bits[some], starts, axis=0)
        elements[elements_of_bits[starts]] |= unions


def order_classes(
    tasks: Enumeration, rounds: Array, *, by_program: bool
) -> HappensBefore:
    """The relation of the classes of `tasks`, given the round in which each one runs.
    Without `by_program`, events alone order them."""
    classes = task_classes(tasks, by_program=by_program)
    examples = first_rows([classes])
    level, queues = rounds[examples], None
    if by_program:
        queues = tasks.queues.of(examples)
        position = np.where(queues.strided, queues.position, 0)
        level = level * (int(position.max(initial=0)) + 1) + position
    return HappensBefore(
        classes,
        level,
        tasks.wait[examples],
        tasks.free_wait[examples],
        tasks.notify[examples],
        tasks.elements.total,
        queues,
    )
