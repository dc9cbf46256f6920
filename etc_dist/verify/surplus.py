"""Grids with a loaded extent, for all data: which tasks exist for which counts."""

from __future__ import annotations

from collections.abc import Container

import numpy as np

from etc_dist.errors import DeadlockError, GraphError
from etc_dist.verify.enumeration import NONE, Array, Enumeration, Mask, rows
from etc_dist.verify.equal_rows import first_rows, row_numbers
from etc_dist.verify.unchecked import missing
from etc_dist.verify.violations import Fault, Tally

ALWAYS, COUNTS = 0, 1 << 40
"""Since when a task exists: always, or as soon as the n-th loaded count is k or more,
as n * COUNTS + k."""


def check_surplus(tasks: Enumeration, known_tensors: Container[str]) -> list[Fault]:
    """Refuse elements with an expected count that is not loaded, and notifiers or
    waiters that do not exist for all counts. `known_tensors` have known values.

    The proof enumerates the tasks at the bound. Those of smaller counts are a part of
    them, in which no task waits for one that is missing, nor notifies an element that
    no task waits for, if all notifiers of an element exist since the same count, all
    its waiters since that or a larger one, and one waiter since that one."""
    since = _since(tasks, known_tensors)
    if not since.any():
        return []
    is_unknown = _unknown(tasks)
    task, slot = np.nonzero(~is_unknown[tasks.notify])
    element = tasks.notify[task, slot]
    first, last = np.full((2, tasks.elements.total), NONE)
    first[element] = last[element] = since[task]
    np.minimum.at(first, element, since[task])
    np.maximum.at(last, element, since[task])

    waiter, slot = np.nonzero(~is_unknown[tasks.wait])
    waited_elements = tasks.wait[waiter, slot]
    # Surplus tasks wait once, too: for the event after which the count is known.
    limited = np.repeat(
        [block.call.waits_for_count for block in tasks.blocks],
        [block.count for block in tasks.blocks],
    )
    by = np.where(limited[waiter] & (slot == 0), ALWAYS, since[waiter])
    need = last[waited_elements]
    is_later = (by // COUNTS == need // COUNTS) & (by >= need)
    bad = (first[waited_elements] != need) | ((need != ALWAYS) & ~is_later)
    tally = Tally()
    for n in np.flatnonzero(bad & (need != NONE)):
        name = tasks.elements.name(int(waited_elements[n]))
        text = f"{tasks.name(int(waiter[n]))} waits for {name}, which tasks notify "
        text += "that do not exist for all counts of their grids for which it exists"
        fix = "load its expected count, as in expects=lambda s: used.load(0) * columns"
        cause = "few", name.partition("[")[0]
        tally.add(cause, Fault(DeadlockError, text, fix))
    is_served = np.zeros(tasks.elements.total, bool)
    is_served[waited_elements[by == need]] = True
    idle = ~is_served & (first != NONE)
    idle[waited_elements[bad]] = False  # reported
    is_awaited = np.zeros_like(idle)
    is_awaited[waited_elements] = True  # others are reported elsewhere
    for e in np.flatnonzero(idle & is_awaited):
        name = tasks.elements.name(int(e))
        text = f"{name} is notified for some counts for which no task waits for it"
        fix = "wait for it in a task that exists for the same counts"
        tally.add(("idle", name.partition("[")[0]), Fault(GraphError, text, fix))
    return tally.faults()


def _since(tasks: Enumeration, known_tensors: Container[str]) -> Array:
    """Since when each task exists, by the counts that are not known."""
    since = np.full(tasks.tasks, ALWAYS)
    counts: dict[tuple[object, ...], int] = {}
    for block in tasks.blocks:
        axis, count = block.call.limited, block.call.count
        if axis is None or count is None or not missing([count], known_tensors):
            continue
        index = rows(block, count.index)
        turns = index[:, first_rows([*index])]
        keys = [(block.rank, count.tensor, *turn) for turn in turns.T.tolist()]
        count_numbers = np.array(
            [counts.setdefault(k, len(counts) + 1) for k in keys], np.int64
        )
        at = block.values(axis.symbol) + 1
        since[block.tasks] = count_numbers[row_numbers([*index])] * COUNTS + at
    return since


def _unknown(tasks: Enumeration) -> Mask:
    """Of each element, and of NONE, whether it is unknown, or its expected count."""
    is_unknown = np.zeros(tasks.elements.total + 1, bool)
    is_unknown[NONE] = True
    for name in tasks.unknown_events | tasks.unknown_counts:
        size = int(tasks.elements.shape[name].prod(axis=1).sum())
        begin = int(tasks.elements.first[name][0])
        is_unknown[begin : begin + size] = True
    return is_unknown
