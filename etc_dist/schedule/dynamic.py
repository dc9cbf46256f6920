"""Dynamic scheduling: tasks of queued calls are pushed once their waits are met, all
others are claimed before."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

from etc_dist.errors import ScheduleError
from etc_dist.ir.call import RANK, TASK, Call, row_major
from etc_dist.ir.event import EventRef
from etc_dist.ir.expr import Expr
from etc_dist.ir.function import TENSOR, TRANSFER
from etc_dist.ir.graph import GraphFunction
from etc_dist.ir.interval import interval
from etc_dist.schedule.plan import QUEUE, Lane, Plan, gating_axes
from etc_dist.schedule.static import require_calls

MOST_WAITS = 32
"""Waits of a call, at most: a word has one bit for each that is met."""


def schedule_dynamic(graph: GraphFunction) -> Plan:
    """The dynamic plan of `graph`: both lanes take tasks from a queue. The task that
    makes the last notification of an event pushes the queued tasks that wait for it.

    Calls that are not queued keep their order. Tasks of other calls are ordered by
    group, since groups become ready as a whole. Raises ScheduleError for a graph
    without calls, and for one whose ready tasks cannot be found on the GPU."""
    require_calls(graph)
    return plan_dynamic(graph, leading_calls(graph))


def plan_dynamic(graph: GraphFunction, claimed_names: Collection[str]) -> Plan:
    """The dynamic plan of `graph` in which the calls `claimed_names` are not queued,
    although they wait. Raises ScheduleError if a notifier cannot find the tasks that it
    releases, or claimed tasks could wait for queued ones."""
    if reasons := [
        *claimed_obstacles(graph, claimed_names),
        *_obstacles(graph, claimed_names),
    ]:
        raise ScheduleError(
            f"graph {graph.name} cannot be scheduled dynamically",
            where=f"graph {graph.name}",
            wanted="waits that determine without loads which tasks an event releases",
            got="; ".join(reasons),
            fix='use schedule="static"',
        )
    calls = (c if c.name in claimed_names else _in_groups(c) for c in graph.calls)
    graph = replace(graph, calls=tuple(calls))
    lanes = []
    for name in (TENSOR, TRANSFER):
        calls_of_lane = [c for c in graph.calls if c.function.lane == name]
        calls_of_lane.sort(key=lambda c: (bool(c.waits), c.name not in claimed_names))
        first = tuple(c.name for c in calls_of_lane if c.name in claimed_names)
        lanes.append(Lane(name, tuple(calls_of_lane), QUEUE, first))
    return Plan(graph, "dynamic", tuple(lanes))


def leading_calls(graph: GraphFunction) -> tuple[str, ...]:
    """The calls at the start of a graph before which no other task is ready, so that
    they need no queue: each notifies one element, which all other calls follow."""
    leading: list[str] = []
    waiting = [call for call in graph.calls if call.waits]
    for n, call in enumerate(waiting[:-1]):
        later_names = {c.name for c in waiting[n + 1 :]}
        is_single = all(map(_is_one_element, call.notifies))
        if call.loops or call.limited is not None or not is_single:
            break
        if _followers(graph, call) != later_names:
            break
        leading.append(call.name)
    return tuple(leading)


def _is_one_element(ref: EventRef) -> bool:
    """Whether all tasks of a call notify the same element of their rank."""
    symbols = (symbol for part in ref.parts for symbol in part.symbols)
    has_coordinates = any(symbol.kind == "coordinate" for symbol in symbols)
    return not (has_coordinates or ref.guards or ref.events.cross_rank)


def _followers(graph: GraphFunction, call: Call) -> set[str]:
    """The names of the calls that depend on `call`, directly or not."""
    names, following = set[str](), [call]
    while following:
        events = {ref.events.name for ref in following.pop().notifies}
        for waiter in graph.calls:
            is_follower = any(ref.events.name in events for ref in waiter.waits)
            if is_follower and waiter.name not in names:
                names.add(waiter.name)
                following.append(waiter)
    return names


def _in_groups(call: Call) -> Call:
    """`call` in the order of its groups, if it has several in a queue."""
    if not call.waits or not gating_axes(call):
        return call
    return replace(call, order=group_order(call))


def group_order(call: Call) -> tuple[Expr, ...]:
    """The order of a call with waits: row-major, the coordinates in its waits first.
    Unchanged if there are none in its waits: all its tasks are one group."""
    gating = gating_axes(call)
    if not gating:
        return call.order
    axes = [*gating, *(axis for axis in call.axes if axis not in gating)]
    expr_by_axis = dict(zip(axes, row_major(axes, TASK), strict=True))
    return tuple(expr_by_axis[axis] for axis in call.axes)


def _obstacles(graph: GraphFunction, claimed_names: Collection[str]) -> Iterator[str]:
    """The reasons why a notifier cannot derive the groups that an event releases."""
    names_of_rank = _of_rank(graph)
    for events in graph.events:
        if events.carried_by:
            yield f"nothing counts {events.name}, which {events.carried_by} carries"
    for call in graph.calls:
        if call.limited is not None and not call.waits_for_count:
            what = f"call {call.name} has a loaded extent"
            yield f"{what}, and its tasks have no first wait in common"
    for call in graph.calls:
        if not call.waits or call.name in claimed_names:
            continue
        if len(call.waits) > MOST_WAITS:
            excess = f"{len(call.waits)} waits, more than {MOST_WAITS}"
            yield f"call {call.name} has {excess}"
        for axis in call.axes:
            if any(symbol.name in names_of_rank for symbol in axis.extent.symbols):
                yield f"the grid of call {call.name}, which waits, depends on the rank"
        yield from _wait_obstacles(call)
        yield from _surplus_obstacles(call)
        has_peers = any(ref.events.cross_rank for ref in call.free_waits)
        if has_peers and call.loaded_waits:
            # NOTE: the notifier that meets the other waits checks for a count of zero;
            # a peer cannot load it.
            loaded_texts = ", ".join(map(str, call.loaded_waits))
            waits = f"waits for peers and for {loaded_texts}"
            yield f"call {call.name} {waits}, a loaded count"


def claimed_obstacles(
    graph: GraphFunction, claimed_names: Collection[str]
) -> Iterator[str]:
    """The reasons why the calls `claimed_names` cannot be claimed before their waits
    are met: all workers could hold tasks that wait for a queued one, and claimed
    tickets of surplus tasks cannot be skipped."""
    for call in graph.calls:
        if call.name not in claimed_names:
            continue
        if call.limited is not None or call.loops:
            yield f"call {call.name} is claimed first, in a loop or a loaded extent"
        for ref in call.waits:
            for notifier in graph.calls:
                events = {e.events.name for e in notifier.notifies}
                is_queued = notifier.waits and notifier.name not in claimed_names
                if ref.events.name in events and is_queued:
                    after = f"{ref}, which the queued call {notifier.name} notifies"
                    yield f"call {call.name} is claimed first, and waits for {after}"


def _wait_obstacles(call: Call) -> Iterator[str]:
    """The reasons why a notifier cannot compute which groups of a call wait for an
    element, or how many notifications they wait for."""
    for ref in call.waits:
        if any(part.is_loaded for part in ref.index):
            yield f"call {call.name} waits for {ref}, an element that is loaded"
        if ref.events.cross_rank and ref.events.expects.is_loaded:
            yield f"{ref.events.name} is cross-rank, its expected count is loaded"
        elif ref.events.cross_rank and _decides_alone(call, ref):
            yield f"call {call.name} waits for {ref} alone, by a loaded condition"


def _surplus_obstacles(call: Call) -> Iterator[str]:
    """The reason why the notifier of a call's first wait cannot leave out the groups
    that do not exist."""
    if call.limited is None or not call.waits_for_count:
        return
    first = call.waits[0]
    if first.events.cross_rank or not is_positive(first):
        after = f"{first.events.name}, after which it is known, may expect 0 or peers"
        yield f"call {call.name} has a loaded extent, and {after}"


def _decides_alone(call: Call, ref: EventRef) -> bool:
    """Whether a loaded condition of `ref` decides whether a group waits at all. A peer
    cannot load it."""
    return ref.holds.is_loaded and len(call.waits) == 1


def is_positive(ref: EventRef) -> bool:
    """Whether a wait for `ref` is for at least one notification, for all dims."""
    return interval(ref.expects, {})[0] > 0


def _of_rank(graph: GraphFunction) -> set[str]:
    """The names of the rank and of all named numbers that depend on it."""
    names = {RANK.name}
    for symbol, value in graph.derived:
        if any(s.name in names for s in value.symbols):
            names.add(symbol.name)
    return names
