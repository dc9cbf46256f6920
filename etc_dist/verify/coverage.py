"""Coverage: elements written twice or never, writes to peers without a notification."""

from __future__ import annotations

import numpy as np

from etc_dist.errors import GraphError, RaceError
from etc_dist.verify.cells import Cells
from etc_dist.verify.enumeration import NONE, Enumeration
from etc_dist.verify.violations import Fault, Tally


def check_once(tasks: Enumeration, cells: Cells, kind: str, tally: Tally) -> None:
    """Refuse cells that are written more than once. `kind` describes the tensor: an
    output, or a tensor that index expressions load from."""
    writes = np.flatnonzero(cells.write)
    cell = cells.cell[writes]
    twice = np.flatnonzero(cell[1:] == cell[:-1])
    if twice.size:
        first, second = (
            tasks.name(int(cells.task[writes[twice[0] + k]])) for k in (0, 1)
        )
        text = (
            f"{cells.name(int(cell[twice[0]]))} is written by {first} and by {second}"
        )
        fix = f"write each element of {kind} in exactly one task"
        fault = Fault(GraphError, text, fix, int(twice.size))
        tally.add(("twice", cells.tensor.name), fault)


def check_complete(cells: Cells, tally: Tally) -> None:
    """Refuse cells of an output that no task writes."""
    cell = cells.cell[cells.write]
    total = int(np.prod(cells.shape, dtype=np.int64))
    once = cell[np.diff(cell, prepend=-1) != 0]
    if once.size < total:
        gap = np.flatnonzero(once != np.arange(once.size))
        first = int(gap[0]) if gap.size else once.size
        text = f"no task writes {cells.name(first)}, a part of the output"
        fix = "extend the grid, or the regions, to the whole output"
        fault = Fault(GraphError, text, fix, total - once.size)
        tally.add(("missing", cells.tensor.name), fault)


def check_reads(
    tasks: Enumeration, cells: Cells, has_order: bool, tally: Tally
) -> None:
    """Refuse reads of cells that no other task writes, except gathers. With
    `has_order`, also those by the first task that writes the cell."""
    count = cells.cell.size
    if not count:
        return
    is_first = np.ones(count, bool)
    is_first[1:] = cells.cell[1:] != cells.cell[:-1]
    begin = np.flatnonzero(is_first)
    entry = np.where(cells.write, np.arange(count), count)
    first = np.minimum.reduceat(entry, begin)
    writer = np.append(cells.task, NONE)[first][np.cumsum(is_first) - 1]
    is_own = (writer == cells.task) & has_order
    needs = ~(cells.write | cells.gathered)
    bad = np.flatnonzero(needs & (is_own | (writer == NONE)))
    if bad.size:
        writers = "other task has written" if is_own[bad[0]] else "task writes"
        text = (
            f"{tasks.name(int(cells.task[bad[0]]))} {cells.verb(int(bad[0]))} "
            f"{cells.name(int(cells.cell[bad[0]]))}, which no {writers}"
        )
        fix = "extend the written regions to all elements that are read, or shrink the "
        fix += "read region"
        fault = Fault(GraphError, text, fix, int(bad.size))
        tally.add(("unwritten", cells.tensor.name), fault)


def check_remote_writes(tasks: Enumeration, counted_tasks: Enumeration) -> list[Fault]:
    """Refuse a write into a peer's memory without a notification to that peer.
    `counted_tasks`: the tasks without events that flagged tensors carry, which notify
    of their own words alone.

    A task there waits for the notification (else `count_notifications` refuses it), so
    the data arrives before the epoch of the peer ends."""
    tally = Tally()
    # NONE, as an index, selects the last entry: no rank.
    rank_of = np.concatenate((tasks.elements.rank, [NONE]))
    for access in tasks.accesses:
        if not access.write:
            continue
        by = tasks if access.region.tensor.flagged else counted_tasks
        ranks = rank_of[by.notify[access.task]]
        has_notified = (ranks == access.rank[:, None]).any(axis=1)
        bad = np.flatnonzero(~has_notified & (access.rank != tasks.rank[access.task]))
        if bad.size:
            fault = Fault(
                RaceError,
                f"{tasks.name(int(access.task[bad[0]]))} writes {access.region}, on "
                f"rank {access.rank[bad[0]]}, and notifies no event of that rank: "
                f"nothing orders its arrival with that rank's next epoch",
                "notify an event .on(the same rank) that a task there waits for",
                int(bad.size),
            )
            tally.add(str(access.region), fault)
    return tally.faults()
