"""Flagged tensors: every word that a task reads is one that it may poll, and no run
writes words that peers may still read.

A task polls the words that it reads, and nothing else. So an event that a flagged
tensor carries orders the writes of these words before their reads, and no other
accesses: elsewhere the proof leaves it out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from etc_dist.errors import RaceError
from etc_dist.verify.cells import Cells
from etc_dist.verify.coverage import check_once
from etc_dist.verify.enumeration import NONE, Array, Enumeration, Mask
from etc_dist.verify.violations import Fault, Tally


def without_flags(tasks: Enumeration) -> Enumeration:
    """The tasks without events that flagged tensors carry."""
    names = [events.name for events in tasks.plan.graph.events if events.carried_by]
    if not names:
        return tasks
    is_carried = _elements_of(tasks, names)
    wait, notify = (
        np.where(is_carried[table], NONE, table) for table in (tasks.wait, tasks.notify)
    )
    return replace(tasks, wait=wait, notify=notify)


def check_words(tasks: Enumeration, cells: Cells, tally: Tally) -> None:
    """Refuse elements of a flagged tensor that are written twice, that no task reads,
    or that a task reads without a wait for an event that their writer notifies."""
    check_once(tasks, cells, "a flagged tensor", tally)
    if not cells.cell.size:
        return
    begin = np.flatnonzero(np.diff(cells.cell, prepend=NONE))
    count = np.diff(begin, append=cells.cell.size)
    writer = np.repeat(
        np.maximum.reduceat(np.where(cells.write, cells.task, NONE), begin), count
    )
    num_writes = np.add.reduceat(cells.write.astype(np.int64), begin)
    unread = np.flatnonzero((num_writes > 0) & (count == num_writes))
    if unread.size:
        first = int(begin[unread[0]])
        text = f"{tasks.name(int(cells.task[first]))} writes "
        text += f"{cells.name(int(cells.cell[first]))}, which no task reads"
        fix = "write only words that a task of that rank reads: it polls them, so that "
        fix += "they have arrived before the run ends"
        tally.add(
            ("unread", cells.tensor.name),
            Fault(RaceError, text, fix, int(unread.size)),
        )
    read = np.flatnonzero(~cells.write & (writer != NONE))
    names = [
        events.name
        for events in tasks.plan.graph.events
        if events.carried_by == cells.tensor.name
    ]
    bad = read[~_are_ordered(tasks, writer[read], cells.task[read], names)]
    if bad.size:
        place = int(bad[0])
        reader = tasks.name(int(cells.task[place]))
        by = tasks.name(int(writer[place]))
        text = (
            f"{reader} reads {cells.name(int(cells.cell[place]))}, and waits for no "
            f"event of the tensor that {by} notifies, which writes it"
        )
        fix = "name the element that the writer notifies in waits="
        tally.add(
            ("flag", cells.tensor.name), Fault(RaceError, text, fix, int(bad.size))
        )


def check_returns(tasks: Enumeration) -> list[Fault]:
    """Of a graph with flagged tensors, refuse a rank that waits for nothing of another
    one on its host.

    Run e + 2 writes the words of run e again. In run e + 1 each rank has waited for all
    others: these had begun it, and so had read all words of run e. NOTE: also at shapes
    without flagged words, since run e + 1 may have one of these.
    """
    graph = tasks.plan.graph
    if not any(tensor.flagged for tensor in graph.tensors):
        return []
    answers = np.eye(graph.world_size, dtype=bool)
    is_awaited = np.zeros(tasks.elements.total + 1, bool)
    is_awaited[tasks.wait] = True
    is_awaited[NONE] = False
    for column in tasks.notify.T:
        some = np.flatnonzero(is_awaited[column])
        answers[tasks.rank[some], tasks.elements.rank[column[some]]] = True
    host = np.arange(graph.world_size) // graph.local_size
    lacking = np.argwhere(~answers & (host[:, None] == host))
    if not lacking.size:
        return []
    notifier, waiter = map(int, lacking[0])
    text = (
        f"rank {waiter} waits for no task of rank {notifier} in this run: in the next "
        "one it may write flagged words that this rank still reads"
    )
    fix = "wait for an event of each other rank in every run"
    return [Fault(RaceError, text, fix, len(lacking))]


def _elements_of(tasks: Enumeration, names: list[str]) -> Mask:
    """Of each element, and last of none, whether it is of one of these events."""
    is_one = np.zeros(tasks.elements.total + 1, bool)
    for name in names:
        sizes = tasks.elements.shape[name].prod(axis=1)
        for first, size in zip(tasks.elements.first[name], sizes, strict=True):
            is_one[first : first + size] = True
    return is_one


def _are_ordered(
    tasks: Enumeration, first: Array, second: Array, names: list[str]
) -> Mask:
    """Pairs of which the second task waits for an element of `names` that the first one
    notifies."""
    is_carried = _elements_of(tasks, names)
    are_ordered = np.zeros(first.shape, bool)
    for notified_column in tasks.notify.T:
        elements = notified_column[first]
        for awaited_column in tasks.wait.T:
            are_ordered |= (elements == awaited_column[second]) & is_carried[elements]
    return are_ordered
