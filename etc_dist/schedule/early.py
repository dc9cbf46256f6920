"""Reads that come before a task's last wait, as tasks of their own, for the proof."""

from __future__ import annotations

from dataclasses import replace

from etc_dist.ir.function import TRANSFER, DeviceFunction
from etc_dist.ir.graph import Call
from etc_dist.schedule.plan import QUEUE, Plan


def with_early_reads(plan: Plan) -> Plan | None:
    """The plan with one more call for each that reads early, whose tasks wait for all
    but the last of its waits and only read that. None if no call reads early: from a
    queue a task comes with all its waits met.

    They come last in the transfer lane, which goes by ticket: there nothing but events
    orders them, so what orders them orders the early reads of the real tasks. That
    these come before later writes is proved of the tasks' reads as a whole."""
    readers = tuple(
        _reader(call)
        for lane in plan.lanes
        for call in lane.calls
        if call.function.early and lane.policy != QUEUE
    )
    if not readers:
        return None
    graph = replace(plan.graph, calls=(*map(_late, plan.graph.calls), *readers))
    lanes = []
    for lane in plan.lanes:
        more = readers if lane.name == TRANSFER else ()
        lanes.append(replace(lane, calls=(*map(_late, lane.calls), *more)))
    return replace(plan, graph=graph, lanes=tuple(lanes))


def _reader(call: Call) -> Call:
    name, reads = (
        f"{call.name}_early",
        tuple(call.reads[n] for n in call.function.early),
    )
    function = DeviceFunction(
        name=name,
        body=lambda *_: None,
        source=call.function.source,
        lane=TRANSFER,
        reads=len(reads),
        writes=0,
    )
    return replace(
        call,
        name=name,
        function=function,
        reads=reads,
        writes=(),
        waits=call.waits[:-1],
        notifies=(),
    )


def _late(call: Call) -> Call:
    return replace(call, function=replace(call.function, early=()))
