"""Decodes the device's fault records: unmet waits, and data out of range."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from etc_dist.codegen.layout import (
    EVENT_WAIT,
    INSIDE_WORKER,
    MAX_FAULTS,
    OUT_OF_RANGE,
    PEER_START,
)
from etc_dist.errors import ArgumentError, RangeRecord, WaitRecord, WorkersRecord
from etc_dist.ir import Call
from etc_dist.ir.function import LANES
from etc_dist.schedule import Plan

Record = WaitRecord | RangeRecord | WorkersRecord

SHOWN = 4
"""Tasks out of range that one error names."""


def decode(
    plan: Plan, control: Any, dims: Mapping[str, int], rank: int, workers: int
) -> list[Record]:
    """The records of `control`, of a rank with `workers` workers. Waits inside a worker
    are left out if there are others, which cause them. If data was out of range, all
    other records are left out."""
    count = min(int(control["faults"]), MAX_FAULTS)
    faults = sorted(control["fault"][:count], key=lambda f: int(f["event"]))
    invalid = [f for f in faults if f["event"] == OUT_OF_RANGE]
    if invalid:
        return [_range_record(plan, f, dims, rank) for f in invalid]
    if any(f["event"] != INSIDE_WORKER for f in faults):
        faults = [f for f in faults if f["event"] != INSIDE_WORKER]
    records: list[Record] = [_wait_record(plan, f, dims, rank) for f in faults]
    if control["resident"]:
        records.append(WorkersRecord(rank, int(control["resident"]), workers))
    return records


def out_of_range(records: Sequence[RangeRecord]) -> ArgumentError:
    """The error for tasks with data out of range, of any ranks."""
    first = records[0]
    more = f"; and {len(records) - SHOWN} more" if len(records) > SHOWN else ""
    return ArgumentError(
        "the data of a run does not fit its graph; the run was ended on all ranks",
        where="; ".join(map(str, records[:SHOWN])) + more,
        wanted=first.wanted,
        got=first.got,
        fix="correct the values in the tensors that these expressions load (inputs, or "
        "results of earlier tasks), or the expressions or order= of the call",
    )


def describe_workers(records: Sequence[Record]) -> str:
    """The ranks of a run on GPUs whose workers had not all begun, or that all had."""
    counts = [r for r in records if isinstance(r, WorkersRecord)]
    missing = [r for r in counts if r.begun < r.workers]
    if missing:
        return "; ".join(map(str, missing))
    return "all workers had begun" if counts else ""


def _task(plan: Plan, fault: Any, env: dict[str, Any]) -> tuple[Call, str]:
    call = plan.graph.calls[int(fault["call"])]
    place = call.coordinates(int(fault["task"]), env)
    return call, call.label([int(v) for v in place.values()])


def _range_record(
    plan: Plan, fault: Any, dims: Mapping[str, int], rank: int
) -> RangeRecord:
    call, task = _task(plan, fault, plan.graph.environment(dims, rank))
    regions = [r for r in (*call.reads, *call.writes) if r.is_loaded]
    events = [*call.loaded_waits, *(ref for ref in call.notifies if ref.is_loaded)]
    loading = ", ".join(dict.fromkeys(map(str, (*regions, *events))))
    lane = LANES[int(fault["lane"])]
    wanted = "elements, regions, ranks, loads and 32-bit results in range, in "
    wanted += loading
    got = "one out of range"
    return RangeRecord(rank, int(fault["worker"]), lane, task, wanted=wanted, got=got)


def _wait_record(
    plan: Plan, fault: Any, dims: Mapping[str, int], rank: int
) -> WaitRecord:
    env = plan.graph.environment(dims, rank)
    # A wait inside a worker has no task.
    task = "a warp" if fault["event"] == INSIDE_WORKER else _task(plan, fault, env)[1]
    kind, index = int(fault["event"]), int(fault["index"])
    have, want = int(fault["have"]), int(fault["want"])
    if kind == EVENT_WAIT:
        event = _element(plan, index, env)
    elif kind == PEER_START:
        event = f"the start of rank {index}"
    else:
        event, have, want = "another warp of its worker", 0, 1
    lane = LANES[int(fault["lane"])]
    return WaitRecord(rank, int(fault["worker"]), lane, task, event, have, want)


def _element(plan: Plan, index: int, env: Mapping[str, int]) -> str:
    for events in plan.graph.events:
        shape = [int(s.evaluate(env)) for s in events.shape]
        size = prod(shape)
        if index < size:
            place = ", ".join(str(int(i)) for i in np.unravel_index(index, shape))
            return f"{events.name}[{place}]"
        index -= size
    return f"counter {index}"
