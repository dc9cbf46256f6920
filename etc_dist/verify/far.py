"""Memory of other hosts: only far device functions reach it, only that of partners, and
what they send stays as it is."""

from __future__ import annotations

import numpy as np

from etc_dist.errors import GraphError, RaceError
from etc_dist.ir import Call
from etc_dist.verify.cells import Cells
from etc_dist.verify.enumeration import NONE, Array, Enumeration
from etc_dist.verify.races import reads_before_writes
from etc_dist.verify.violations import Fault, Tally


def check_far(tasks: Enumeration) -> list[Fault]:
    """Refuse writes and notifications on other hosts by functions that are not far, and
    on ranks there that are not partners."""
    size = tasks.plan.graph.local_size
    tally = Tally()
    # NONE, as an index, selects the last entry: no rank.
    rank_of = np.concatenate((tasks.elements.rank, [NONE]))
    for block in tasks.blocks:
        ranks = rank_of[tasks.notify[block.base : block.base + block.count]]
        for k, ref in enumerate(block.call.notifies):
            is_reachable = _reaches(block.call, block.rank, ranks[:, k], size)
            bad = np.flatnonzero((ranks[:, k] != NONE) & ~is_reachable)
            _add(tasks, f"notifies {ref}", block.base + bad, ranks[bad, k], tally)
    for access in tasks.accesses:
        own_rank = tasks.rank[access.task]
        away = np.flatnonzero(access.rank // size != own_rank // size)
        if away.size:
            call = tasks.block(int(access.task[away[0]])).call
            bad = away[~_reaches(call, own_rank[away], access.rank[away], size)]
            what = f"writes {access.region}"
            _add(tasks, what, access.task[bad], access.rank[bad], tally)
    return tally.faults()


def _reaches(call: Call, own_rank: Array | int, rank: Array, size: int) -> Array:
    """Which of these ranks are near ones, or partners where the function is far."""
    is_reachable: Array = rank // size == own_rank // size
    if call.function.far:
        is_reachable = is_reachable | ((rank - own_rank) % size == 0)
    return is_reachable


def check_kept(tasks: Enumeration, cells: Cells, tally: Tally) -> None:
    """Refuse writes to what a far function has read: its bytes may still be on their
    way, until the end of the run."""
    bases = [block.base for block in tasks.blocks]
    far = np.array([block.call.function.far for block in tasks.blocks])
    if not far.any():
        return
    read, write = reads_before_writes(cells)
    bad = np.flatnonzero(far[np.searchsorted(bases, cells.task[read], "right") - 1])
    if bad.size:
        reader, writer = (
            tasks.name(int(cells.task[at[bad[0]]])) for at in (read, write)
        )
        cell = cells.name(int(cells.cell[read[bad[0]]]))
        text = (
            f"{writer} writes {cell}, which {reader} sends to another host in this run"
        )
        fix = "write to other memory, such as one tensor for each turn"
        fault = Fault(RaceError, text, fix, int(bad.size))
        tally.add(("sent", cells.tensor.name), fault)


def _add(tasks: Enumeration, what: str, task: Array, rank: Array, tally: Tally) -> None:
    if task.size:
        text = (
            f"{tasks.name(int(task[0]))} {what}, on rank {rank[0]}: a rank of another "
            f"host, with {tasks.plan.graph.local_size} ranks on each"
        )
        call = tasks.block(int(task[0])).call
        fix = "send rows to ranks of other hosts by push_far"
        if call.function.far:
            text += ", where its partner has another number"
            fix = "send rows to the rank of this number there, which passes them on"
        tally.add((call.name, what), Fault(GraphError, text, fix, int(task.size)))
