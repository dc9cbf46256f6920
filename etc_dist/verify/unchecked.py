"""The parts of a program that a proof leaves out: those with unknown loads."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator

from etc_dist.ir.expr import Expr
from etc_dist.schedule.plan import Plan


def missing(exprs: Iterable[Expr], known_tensors: Container[str]) -> list[str]:
    """The tensors that `exprs` load from and that are not `known_tensors`."""
    names = {load.tensor for e in exprs for load in e.loads}
    return sorted(name for name in names if name not in known_tensors)


def list_unchecked(plan: Plan, known_tensors: Container[str] = ()) -> tuple[str, ...]:
    """The parts of `plan` that `verify` cannot prove, each with the tensors that it
    loads from. `known_tensors` have known values."""
    parts: dict[str, None] = {}
    for what, exprs in _parts(plan):
        absent = missing(exprs, known_tensors)
        if absent:
            parts[f"{''.join(map(str, what))} (loads from {', '.join(absent)})"] = None
    calls = [call for lane in plan.lanes for call in lane.calls]
    refs = [ref for call in calls for ref in (*call.waits, *call.notifies)]
    if any(missing(ref.parts, known_tensors) for ref in refs):
        parts["races and the order of remote writes"] = None
    return tuple(parts)


def _parts(plan: Plan) -> Iterator[tuple[tuple[object, ...], Iterable[Expr]]]:
    """All parts with expressions, each with the parts of its name: extents, counts,
    event elements, regions."""
    calls = [call for lane in plan.lanes for call in lane.calls]
    for call in calls:
        if call.count is not None:
            what = f"the tasks of {call.name}, all taken to exist, and orders by them"
            yield (what,), (call.count,)
    for event in plan.graph.events:
        yield ("the expected count of ", event.name), (event.expects,)
    for call in calls:
        for ref in (*call.waits, *call.notifies):
            yield ("call ", call.name, ", ", ref), ref.parts
    for call in calls:
        for region in (*call.writes, *call.reads):
            yield ("call ", call.name, ", ", region), region.parts
