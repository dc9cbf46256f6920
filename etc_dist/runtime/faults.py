"""Device fault records, put into words by the plan that the run came from."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from etc_dist.codegen.layout import (
    EVENT_WAIT,
    INSIDE_WORKER,
    MAX_FAULTS,
    PEER_START,
    notification_unit,
)
from etc_dist.errors import WaitRecord
from etc_dist.schedule import Plan

_LANES = ("tensor", "transfer")


def decode(
    plan: Plan, control: Any, dims: Mapping[str, int], rank: int
) -> list[WaitRecord]:
    """The records of `control`, the events first: what waits inside a worker only
    stands still because of them."""
    count = min(int(control["faults"]), MAX_FAULTS)
    found = sorted(control["fault"][:count], key=lambda f: int(f["event"]))
    if any(f["event"] != INSIDE_WORKER for f in found):
        found = [f for f in found if f["event"] != INSIDE_WORKER]
    return [_record(plan, f, dims, rank) for f in found]


def _record(plan: Plan, fault: Any, dims: Mapping[str, int], rank: int) -> WaitRecord:
    env = plan.graph.environment(dims, rank)
    call = plan.graph.calls[int(fault["call"])]
    place = call.coordinates(int(fault["task"]), env)
    task = f"{call.name}[{', '.join(str(int(v)) for v in place.values())}]"
    kind, index = int(fault["event"]), int(fault["index"])
    have, want = int(fault["have"]), int(fault["want"])
    if kind == EVENT_WAIT:
        event, unit = _element(plan, index, env)
        # The device counts parts of notifications; people count notifications.
        have, want = have // unit, want // unit
    elif kind == PEER_START:
        event = f"the start of rank {index}"
    else:
        event, have, want = "a hand-over inside its worker", 0, 1
    lane = _LANES[int(fault["lane"])]
    return WaitRecord(rank, int(fault["worker"]), lane, task, event, have, want)


def _element(plan: Plan, index: int, env: Mapping[str, int]) -> tuple[str, int]:
    for events in plan.graph.events:
        shape = [int(s.evaluate(env)) for s in events.shape]
        size = prod(shape)
        if index < size:
            coordinate = []
            for extent in reversed(shape):
                coordinate.append(index % extent)
                index //= extent
            place = ", ".join(map(str, reversed(coordinate)))
            return f"{events.name}[{place}]", notification_unit(plan, events)
        index -= size
    return f"counter {index}", 1
