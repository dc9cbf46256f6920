"""Static scheduling: the order of calls and tasks is fixed before the program runs. As
dynamic scheduling, from Event Tensor (arXiv 2604.13327)."""

from __future__ import annotations

from etc_dist.errors import ScheduleError
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
    lanes = []
    for name in (TENSOR, TRANSFER):
        calls = tuple(c for c in graph.calls if c.function.lane == name)
        uneven = [c for c in calls if c.is_loaded and not c.even]
        is_even = name == TENSOR and not uneven
        policy = STRIDED if is_even else TICKET
        lanes.append(Lane(name, calls, policy))
    return Plan(graph, "static", tuple(lanes))


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
