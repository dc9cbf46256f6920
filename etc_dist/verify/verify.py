"""Prove a plan correct by exact enumeration, before it runs."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from etc_dist.errors import ArgumentError, GraphError, expect_type
from etc_dist.ir.call import Call
from etc_dist.ir.dims import checked_dims, refuse_undefined
from etc_dist.ir.graph import GraphFunction
from etc_dist.schedule.dynamic import claimed_obstacles, group_order
from etc_dist.schedule.plan import Lane, Plan
from etc_dist.verify.cells import Cells, all_cells, merged
from etc_dist.verify.coverage import (
    check_complete,
    check_once,
    check_reads,
    check_remote_writes,
)
from etc_dist.verify.enumerate_plan import enumerate_plan
from etc_dist.verify.enumeration import NONE, Array, Enumeration
from etc_dist.verify.far import check_far, check_kept
from etc_dist.verify.flagged_words import check_returns, check_words, without_flags
from etc_dist.verify.happens_before import order_classes
from etc_dist.verify.index_range import check_index_range
from etc_dist.verify.loaded_accesses import check_own_writes
from etc_dist.verify.operands import check_operands
from etc_dist.verify.progress import count_notifications, run_queues, suppose_events
from etc_dist.verify.races import Races
from etc_dist.verify.surplus import check_surplus
from etc_dist.verify.unchecked import list_unchecked
from etc_dist.verify.violations import Fault, Tally, refuse

MOST_TASKS, MOST_EVENTS = 20_000_000, 50_000_000
"""Limits on the memory of a proof, over all ranks: of tasks, and of event elements."""


@dataclass(frozen=True)
class Verified:
    """What was proved, over all ranks: the numbers of tasks, of event elements that
    tasks wait for, and of accesses (boxes of tensors), and the seconds it took.
    `unchecked` names what was not proved, as it depends on runtime tensors. by_events:
    events order all accesses, with any number of workers."""

    graph: str
    dims: tuple[tuple[str, int], ...]
    workers: int
    tasks: int
    events: int
    accesses: int
    seconds: float
    unchecked: tuple[str, ...]
    by_events: bool

    def show(self) -> str:
        """A summary; stable except for the seconds."""
        dims = ", ".join(f"{name}={value}" for name, value in self.dims)
        lines = [
            f"verified {self.graph}({dims}) with {self.workers} workers a rank: "
            f"{self.tasks} tasks, {self.events} event elements, "
            f"{self.accesses} accesses in {self.seconds:.3f} s"
        ]
        lines += [f"  unchecked: {what}" for what in self.unchecked]
        return "\n".join(lines) + "\n"


def verify(
    plan: Plan,
    dims: Mapping[str, int],
    workers: int,
    tensors: Mapping[str, Sequence[npt.NDArray[Any]]] | None = None,
) -> Verified:
    """Prove that `plan` is a correct program at `dims`, with exactly `workers` resident
    workers on each rank.

    Proved, for every task of every rank:

    * each order is a bijection onto its grid;
    * ranks, event elements and regions are in range; only far functions write to, or
      notify, a rank of another host; operands have equal sizes and do not overlap
      where their device function declares it;
    * every event element gets exactly the notifications it expects, on a rank where
      some task waits for it, for all counts of loaded extents unless the expected count
      is loaded, too; the queues of all lanes run to their end;
    * two tasks that touch the same memory, one of them writing, are ordered by events
      or by program order; no task writes what a far function has read. Early reads are
      ordered by all waits but the last;
    * every element of an output is written once, and what is read from tensors without
      values before the run has been written, except in gathered operands. A load in an
      index expression is such a read, before the task's body.

    Events that flagged tensors carry order the accesses to these alone: each word that
    a task reads is written by one task, which notifies an element that it waits for.

    One run is enumerated, and the next is as safe: a task writes or notifies a peer
    only once the peer has started the same epoch, and all that a peer is sent has
    arrived before its epoch ends, since a task there waits for a notification after it
    (`check_remote_writes`). Flagged words need no start of the peer (`check_returns`).

    tensors: runtime tensor name -> its int32 values on each rank, for expressions that
    load from them. What depends on others is left out and named in
    `Verified.unchecked`.

    Raises ArgumentError for dims or workers that do not fit the plan, and for a plan of
    too many tasks to enumerate. All faults of the program are raised at once:
    DeadlockError or RaceError if all are of that kind, else GraphError."""
    began = time.perf_counter()
    expect_type(workers, int, "workers")
    dims, tensors = checked_dims(plan.graph, dims), dict(tensors or {})
    _check_arguments(plan, dims, workers, tensors)
    subject = f"graph {plan.graph.name}"
    shape = ", ".join(f"{d}={dims[d.name]}" for d in plan.graph.dims) or "no dims"
    where = f"{plan.graph.world_size} ranks, {workers} workers each, at {shape}"
    refuse(subject, where, _check_structure(plan))
    _check_size(plan, dims)
    # A division by zero raises, instead of a warning and a result of zero.
    with np.errstate(divide="raise"):
        tasks, faults = enumerate_plan(plan, dims, workers, tensors)
        faults += check_index_range(plan.graph, tasks.environments)
        faults += check_operands(tasks, tensors)
        counts, new_faults = count_notifications(tasks)
        faults += new_faults + check_surplus(tasks, tensors)
        new_faults, by_events = _check_tasks(tasks, *run_queues(tasks, counts))
    faults += new_faults
    refuse(subject, where, faults)
    return Verified(
        plan.graph.name,
        tuple((d.name, dims[d.name]) for d in plan.graph.dims),
        workers,
        tasks.tasks,
        int(np.count_nonzero(counts.awaited)),
        sum(a.task.size for a in tasks.accesses),
        time.perf_counter() - began,
        list_unchecked(plan, tensors),
        by_events,
    )


def _check_size(plan: Plan, dims: Mapping[str, int]) -> None:
    graph = plan.graph
    env = graph.environment(dims, 0)
    with np.errstate(divide="raise"):
        tasks = sum(int(c.tasks.evaluate(env)) for c in graph.calls)
        events = sum(
            prod(max(0, int(size.evaluate(env))) for size in events.shape)
            for events in graph.events
        )
    limits = {
        "tasks": (tasks * graph.world_size, MOST_TASKS),
        "events": (events * graph.world_size, MOST_EVENTS),
    }
    for kind, (count, most) in limits.items():
        if count > most:
            raise ArgumentError(
                f"graph {graph.name} is too large to be proved",
                where=", ".join(f"{k}={v}" for k, v in dims.items()) or "no dims",
                wanted=f"at most {most} {kind} on all ranks",
                got=str(count),
                fix="use larger tiles, or prove it at smaller dims and run this shape "
                "with ETC_DIST_VERIFY=0",
            )


def _check_tasks(
    tasks: Enumeration, rounds: Array, stuck: list[Fault]
) -> tuple[list[Fault], bool]:
    """Check the accesses of tasks, given the round in which each one runs, and whether
    events alone order them.

    If some task never runs, tasks have no order: only coverage is checked."""
    supposed_tasks = tasks
    if tasks.unknown_events:
        # They order more than the plan does: a pair without an order is a race.
        supposed_tasks, rounds = suppose_events(tasks)
    has_order = not stuck and bool((rounds != NONE).all())
    supposed_tasks = without_flags(supposed_tasks)
    access_faults, by_events = _check_accesses(
        tasks, supposed_tasks, rounds, has_order=has_order
    )
    faults = stuck + access_faults
    if not tasks.unknown_events:
        faults += check_remote_writes(tasks, supposed_tasks)
    return faults + check_far(tasks) + check_returns(tasks), by_events


def _check_accesses(
    tasks: Enumeration, supposed_tasks: Enumeration, rounds: Array, *, has_order: bool
) -> tuple[list[Fault], bool]:
    """Check the accesses that differ, where events alone order tasks. That is less than
    the order of the plan: a tensor without a fault there has none. Of the others check
    all accesses, in the order of the plan."""
    tally = Tally()
    names = {tensor.name for tensor in tasks.plan.graph.tensors}
    for by_program in (False, True):
        order = order_classes(supposed_tasks, rounds, by_program=by_program)
        every = all_cells(tasks, order, names, reduced=not by_program)
        tally = _check_cells(tasks, every, Races(tasks, order) if has_order else None)
        names = {name for _, name, *_ in tally.found}
        if not names:
            break
    return tally.faults(), not by_program


def _check_cells(
    tasks: Enumeration, every: Iterable[Cells], races: Races | None
) -> Tally:
    """Check the accesses of each cell; without `races`, only their coverage. The cause
    of a fault is its kind, the tensor, and more."""
    tally = Tally()
    loaded_tensors = tasks.plan.graph.loaded_tensors()
    for cells in every:
        is_complete = cells.tensor.name not in tasks.unknown_writes
        if cells.tensor.kind == "output":
            check_once(tasks, cells, "an output", tally)
            if is_complete:
                check_complete(cells, tally)
        elif cells.tensor in loaded_tensors:
            kind = "a tensor that index expressions load from"
            check_once(tasks, cells, kind, tally)
        check_own_writes(tasks, cells, tally)
        if is_complete and not cells.tensor.is_given:
            check_reads(tasks, cells, races is not None, tally)
        if cells.tensor.flagged:
            check_words(tasks, cells, tally)
        elif races is not None:
            races.check(merged(cells), is_complete)
            check_kept(tasks, cells, tally)
    if races is not None:
        races.add_to(tally)
    return tally


def _check_arguments(
    plan: Plan,
    dims: Mapping[str, int],
    workers: int,
    tensors: Mapping[str, Sequence[npt.NDArray[Any]]],
) -> None:
    graph, where = plan.graph, f"verify of graph {plan.graph.name}"
    refuse_undefined(graph, dims)
    plan.expect_workers(workers)
    loadable = [t.name for t in graph.tensors if t.dtype == "int32"]
    for name, values in tensors.items():
        if name not in loadable:
            raise ArgumentError(
                f"the graph has no tensor {name} to load from",
                where=where,
                wanted=f"values of {', '.join(loadable) or 'no tensor'}",
                got=name,
                fix="give values of the graph's int32 tensors only",
            )
        if len(values) != graph.world_size:
            raise ArgumentError(
                f"runtime tensor {name} is not given for all ranks",
                where=where,
                wanted=f"{graph.world_size} arrays, one for each rank",
                got=f"{len(values)}",
                fix="gather the tensor's values from all ranks",
            )
        tensor = graph.tensor(name)
        for rank, array in enumerate(map(np.asarray, values)):
            if array.dtype.kind not in "iu":
                raise ArgumentError(
                    f"runtime tensor {name} has no integers",
                    where=where,
                    wanted=f"{name}: an array of int32",
                    got=f"{array.dtype} on rank {rank}",
                    fix="give the int32 values that a run would have",
                )
            env = graph.environment(dims, rank)
            shape = [int(n.evaluate(env)) for n in tensor.shape]
            if list(array.shape) != shape:
                raise ArgumentError(
                    f"runtime tensor {name} has another shape",
                    where=where,
                    wanted=f"{name} {shape}",
                    got=f"{list(array.shape)} on rank {rank}",
                    fix="give the values that a run at these dims would have",
                )


def _check_structure(plan: Plan) -> list[Fault]:
    """Faults that need no dims: parts of a plan that do not belong together."""
    texts: list[str] = []
    graph = plan.graph
    plan_calls = sorted(c.name for lane in plan.lanes for c in lane.calls)
    if plan_calls != sorted(c.name for c in graph.calls):
        texts.append(
            f"the plan's lanes hold {plan_calls}, not each call of the graph once"
        )
    for lane in plan.lanes:
        for call in lane.calls:
            texts += [
                f"call {call.name}: {text}" for text in _mismatches(plan, lane, call)
            ]
    claimed_calls = [name for lane in plan.lanes for name in lane.claimed_calls]
    texts += claimed_obstacles(graph, claimed_calls)
    fix = "build graphs by graph_function and plans by a function of etc_dist/schedule"
    return [Fault(GraphError, text, fix) for text in texts] + _check_loaded(graph)


def _check_loaded(graph: GraphFunction) -> list[Fault]:
    """Refuse writes that could change a value after an index expression has loaded it:
    a run is checked with the values that the tensors have at its end."""
    loaded_tensors = graph.loaded_tensors()
    fix = "load from an input, or from a local tensor whose written regions have no "
    fix += "loads"
    return [
        Fault(
            GraphError,
            f"call {call.name} writes {region}, a loaded region of a tensor that index "
            "expressions load from",
            fix,
        )
        for call in graph.calls
        for region in call.writes
        if region.tensor in loaded_tensors and region.is_loaded
    ]


def _mismatches(plan: Plan, lane: Lane, call: Call) -> Iterator[str]:
    if lane.queued(call) and call.order != group_order(call):
        yield "tasks that wait for the same events are not contiguous"
    if call.limited is not None and not call.knows_count:
        yield "its loaded extent is not known after its first wait"
    if len(call.order) != len(call.axes):
        yield f"order gives {len(call.order)} coordinates for {len(call.axes)} axes"
