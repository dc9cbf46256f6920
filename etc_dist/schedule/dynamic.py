"""Dynamic scheduling: a task is taken once all that it waits for has happened."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from etc_dist.errors import ScheduleError
from etc_dist.ir.call import RANK, TASK, Call, Coordinate
from etc_dist.ir.expr import Expr
from etc_dist.ir.function import TENSOR, TRANSFER
from etc_dist.ir.graph import GraphFunction
from etc_dist.schedule.plan import QUEUE, Lane, Plan, gating_axes, passing_axes
from etc_dist.schedule.static import require_calls, schedule_static

MOST_WAITS = 32
"""Waits of a call: a word remembers which of them are met."""


def schedule_dynamic(graph: GraphFunction) -> Plan:
    """The dynamic plan of `graph`: both lanes take tasks from a queue, which whoever
    makes the last notification of an event fills with the tasks that waited for it.

    Calls without waits keep their order; the tasks of the others go group by group, for
    the groups become ready as a whole. Those of the tensor lane's last calls may come
    in passes, or not at all if they are empty. Raises ScheduleError for a graph without
    calls, and for one whose ready tasks cannot be found on the GPU."""
    require_calls(graph)
    reasons = list(_misfits(graph))
    if reasons:
        raise ScheduleError(
            f"graph {graph.name} cannot be scheduled dynamically",
            where=f"graph {graph.name}",
            wanted="waits from which it follows, without loads, which tasks an event "
            "makes ready",
            got="; ".join(reasons),
            fix='use schedule="static"',
        )
    empty = [c.name for c in graph.calls if _has_empty_groups(c)]
    graph = replace(graph, calls=tuple(map(_in_groups, graph.calls)))
    lanes = []
    for name in (TENSOR, TRANSFER):
        mine = [c for c in graph.calls if c.function.lane == name]
        mine.sort(key=lambda c: bool(c.waits))
        cluster = max((c.function.cluster for c in mine), default=1)
        lane = Lane(name, tuple(mine), QUEUE, cluster)
        last = [c.name for c in mine if lane.share(c) == 1 and _is_last(graph, c)]
        passing = tuple(c.name for c in mine if c.name in last and passing_axes(c))
        void = tuple(name for name in last if name in empty)
        lanes.append(replace(lane, passing=passing, void=void))
    return Plan(graph, "dynamic", tuple(lanes))


def schedule_auto(graph: GraphFunction) -> Plan:
    """The dynamic plan of a graph that loads from runtime tensors, where there is one;
    else the static plan."""
    if any(call.is_loaded for call in graph.calls) and not any(_misfits(graph)):
        return schedule_dynamic(graph)
    return schedule_static(graph)


def _in_groups(call: Call) -> Call:
    """`call` in the order of its groups, if it waits."""
    if not gating_axes(call):
        return call
    return replace(call, order=group_order(call), empty_until=None)


def _has_empty_groups(call: Call) -> bool:
    """Whether groups of `call` may have nothing but empty tasks, and who releases them
    can do what is left of these: notify on the own rank."""
    touched = [*(r.rank for r in call.writes), *(r.rank for r in call.notifies)]
    is_own = all(rank is None for rank in touched)
    return call.empty_until is not None and bool(gating_axes(call)) and is_own


def _is_last(graph: GraphFunction, call: Call) -> bool:
    """Whether `call` is of the tensor lane and waits, but none of that lane comes after
    it: what puts off its tasks holds nothing up but the other lane."""
    if call.function.lane != TENSOR or not call.waits:
        return False
    following, found = [call], {call.name}
    while following:
        events = {ref.events.name for ref in following.pop().notifies}
        for other in graph.calls:
            if not any(ref.events.name in events for ref in other.waits):
                continue
            if other.function.lane == TENSOR:
                return False
            if other.name not in found:
                found.add(other.name)
                following.append(other)
    return True


def group_order(call: Call) -> tuple[Expr, ...]:
    """The order of a call with waits: the coordinates that they name first, then the
    others, each row-major. Its own where they name none: its tasks are one group."""
    gating = gating_axes(call)
    if not gating:
        return call.order
    axes = [*gating, *(axis for axis in call.axes if axis not in gating)]
    found = dict(zip(axes, coordinates(axes, TASK), strict=True))
    return tuple(found[axis] for axis in call.axes)


def coordinates(axes: Sequence[Coordinate], index: Expr) -> list[Expr]:
    """The coordinates on `axes` at a place in their row-major sequence."""
    parts: list[Expr] = []
    for axis in reversed(axes[1:]):
        parts.append(index % axis.extent)
        index = index // axis.extent
    return [index, *reversed(parts)] if axes else []


def _misfits(graph: GraphFunction) -> Iterator[str]:
    """Why whoever notifies could not tell what becomes ready, on whatever rank."""
    own = _of_rank(graph)
    for call in graph.calls:
        if len(call.waits) > MOST_WAITS:
            yield f"call {call.name} has {len(call.waits)} waits, not {MOST_WAITS}"
        for axis in call.axes if call.waits else ():
            if any(symbol.name in own for symbol in axis.extent.symbols()):
                yield f"the grid of call {call.name}, which waits, depends on the rank"
        for ref in call.waits:
            if ref.is_loaded:
                yield f"call {call.name} waits for {ref}, an element that is loaded"
            if ref.events.cross_rank and ref.events.expects.is_loaded:
                yield f"{ref.events.name} is cross-rank, its expected count is loaded"
        crosses = any(ref.events.cross_rank for ref in call.free_waits)
        if crosses and call.loaded_waits:
            # NOTE: a count of zero is found by whoever meets the other waits, and a
            # peer cannot load it.
            loaded = ", ".join(map(str, call.loaded_waits))
            yield f"call {call.name} waits for peers and for {loaded}, a loaded count"


def _of_rank(graph: GraphFunction) -> set[str]:
    """The rank, and the named numbers that depend on it."""
    names = {RANK.name}
    for symbol, value in graph.derived:
        if any(s.name in names for s in value.symbols()):
            names.add(symbol.name)
    return names
