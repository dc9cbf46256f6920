"""Static scheduling: the order of calls and tasks is fixed before the program runs. As
dynamic scheduling, from Event Tensor (arXiv 2604.13327)."""

from __future__ import annotations

from collections.abc import Sequence

from etc_dist.errors import ScheduleError
from etc_dist.ir.call import Call
from etc_dist.ir.function import TENSOR, TRANSFER
from etc_dist.ir.graph import GraphFunction, expect_graph
from etc_dist.schedule.plan import STRIDED, TICKET, Lane, Plan


def schedule_static(graph: GraphFunction) -> Plan:
    """The static plan of `graph`: each lane runs its calls in the graph's order.

    Tasks of the tensor lane are assigned round-robin (that paper's base policy), or
    claimed by an atomic ticket if the work of some depends on data and is not even.
    Tasks of the transfer lane are claimed by an atomic ticket. ScheduleError for a
    graph without calls."""
    require_calls(graph)
    lanes, dependent_loops = [], _dependent_loops(graph.calls)
    for name in (TENSOR, TRANSFER):
        calls = tuple(c for c in graph.calls if c.function.lane == name)
        uneven = [c for c in calls if c.is_loaded and not c.even]
        is_even = name == TENSOR and not uneven
        policy = STRIDED if is_even else TICKET
        loops = dependent_loops if is_even else ()
        lanes.append(Lane(name, calls, policy, dependent_loops=loops))
    return Plan(graph, "static", tuple(lanes))


def _dependent_loops(calls: Sequence[Call]) -> tuple[str, ...]:
    """The loops in which a call waits for an event that it or a later call notifies."""

    def depends(name: str) -> bool:
        notified_events: set[str] = set()
        for call in reversed([c for c in calls if name in c.loop_names]):
            notified_events |= {ref.events.name for ref in call.notifies}
            if any(ref.events.name in notified_events for ref in call.waits):
                return True
        return False

    names = dict.fromkeys(name for call in calls for name in call.loop_names)
    return tuple(filter(depends, names))


def require_calls(graph: GraphFunction) -> None:
    """Raise ScheduleError for a graph without calls, TypeError for other objects."""
    expect_graph(graph)
    if not graph.calls:
        raise ScheduleError(
            f"graph {graph.name} has nothing to run",
            where=f"graph {graph.name}",
            wanted="at least one call",
            got="none",
            fix="add g.call(...)",
        )
