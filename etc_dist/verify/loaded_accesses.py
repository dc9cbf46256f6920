"""Loads in index expressions, as accesses of a task before its body.

If the index is known, the box is one element. If the index, or the condition of a
`select` around it, depends on unknown loads, the task may load any element: the box is
the whole tensor."""

from __future__ import annotations

from collections.abc import Sequence, Set

import numpy as np

from etc_dist.errors import GraphError, RaceError
from etc_dist.ir.call import waiting_exprs, working_exprs
from etc_dist.ir.expr import Const, Load
from etc_dist.ir.graph import GraphFunction
from etc_dist.ir.guard import Guard, under
from etc_dist.ir.loads import guarded_loads, loads_of
from etc_dist.ir.tensor import Region
from etc_dist.verify.cells import Cells
from etc_dist.verify.enumeration import (
    BEGINNING,
    EARLY,
    WAITING,
    Access,
    Block,
    Enumeration,
    rows,
    task_name,
)
from etc_dist.verify.violations import Fault, Tally


def load_accesses(
    block: Block, graph: GraphFunction, known_tensors: Set[str], tally: Tally
) -> list[Access]:
    """The loads of the block's tasks; `known_tensors` have known values."""
    accesses: list[Access] = []
    call = block.call
    # All waits of a task from a queue are met before it starts.
    loads_early = call.streams_after is not None or call.function.loads_before_wait
    loads_early = loads_early and not block.lane.queued(call)
    for phase, exprs in (
        (WAITING, waiting_exprs(call)),
        (WAITING if loads_early else BEGINNING, working_exprs(call)),
    ):
        for load, guards in dict.fromkeys(guarded_loads(exprs)):
            access = _access(block, graph, known_tensors, load, guards, phase, tally)
            if access is not None:
                accesses.append(access)
    return accesses


def _access(
    block: Block,
    graph: GraphFunction,
    known_tensors: Set[str],
    load: Load,
    guards: Sequence[Guard],
    phase: int,
    tally: Tally,
) -> Access | None:
    tensor, num_axes = graph.tensor(load.tensor), len(load.index)
    region = Region(tensor, None, load.index, load.shape, (False,) * num_axes)
    rank = np.full(block.count, block.rank)
    extent = rows(block, load.shape)
    conditions = [c for c, _ in guards]
    deciding = (*load.index, *(e for c in conditions for e in (c.left, c.right)))
    if any(inner.tensor not in known_tensors for inner in loads_of(deciding)):
        none = np.zeros_like(extent)
        return Access(region, False, block.tasks, rank, none, extent, phase)
    try:
        is_loading = block.values(under(guards, Const(1), Const(0))) == 1
        at = rows(block, [under(guards, i, Const(0)) for i in load.index])
    except IndexError:  # of an inner load, which is reported separately
        return None
    except ArithmeticError as error:
        text, fix = f"call {block.call.name}, {load}: {error}", "correct the expression"
        tally.add(("load", text), Fault(GraphError, text, fix))
        return None
    wrong = is_loading & ((at < 0) | (at >= extent)).any(axis=0)
    if wrong.any():
        t = int(np.flatnonzero(wrong)[0])
        fault = Fault(
            GraphError,
            f"{task_name(block, t)} loads {tensor.name}{at[:, t].tolist()}, outside of "
            f"{extent[:, t].tolist()}",
            f"keep the index of {load} inside of the tensor",
            int(wrong.sum()),
        )
        tally.add(("load", block.call.name, load), fault)
    right = is_loading & ~wrong
    at = at[:, right]
    return Access(region, False, block.tasks[right], rank[right], at, at + 1, phase)


def check_own_writes(tasks: Enumeration, cells: Cells, tally: Tally) -> None:
    """Refuse tasks that write elements which their own index expressions load: the
    device evaluates these expressions at any time, before and after the task's writes.
    """
    if not cells.cell.size or (cells.phase >= EARLY).all():
        return
    new = (np.diff(cells.cell, prepend=-1) != 0) | (
        np.diff(cells.task, prepend=-1) != 0
    )
    begin = np.flatnonzero(new)
    loads = np.logical_or.reduceat(cells.phase < EARLY, begin)
    entries = begin[loads & np.logical_or.reduceat(cells.write, begin)]
    if entries.size:
        text = (
            f"{tasks.name(int(cells.task[entries[0]]))} writes "
            f"{cells.name(int(cells.cell[entries[0]]))}, which its own index "
            "expressions load"
        )
        fix = "write to another tensor, or in another task"
        fault = Fault(RaceError, text, fix, int(entries.size))
        tally.add(("own", cells.tensor.name), fault)
