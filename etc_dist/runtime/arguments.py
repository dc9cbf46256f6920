"""The argument block of a run, filled in: what a launch hands to the kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from etc_dist.codegen import Source
from etc_dist.codegen.layout import event_base, pace_name, units_name
from etc_dist.errors import ArgumentError
from etc_dist.ir.function import TmaBox
from etc_dist.runtime.memory_plan import Capacity, plan_memory
from etc_dist.schedule import Plan

Block = np.ndarray[Any, np.dtype[Any]]
Encode = Callable[[int, Sequence[int], str, int, TmaBox], Any]
"""(address, shape, dtype, bytes of an element, box) -> a tensor map's 128 bytes."""


@dataclass(frozen=True)
class Places:
    """Where a rank's memory lies: addresses, and sizes in records and nanoseconds."""

    peers: Sequence[int]
    """Every rank's symmetric block."""
    control: int
    status: int
    workspace: int
    local: int
    wait_limit: int
    trace: int = 0
    trace_capacity: int = 0


def fill(
    plan: Plan,
    source: Source,
    dims: Mapping[str, int],
    rank: int,
    capacity: Capacity,
    places: Places,
    number: int = 0,
) -> Block:
    """All but what depends on the caller's arrays. `number` is the shape's own, by
    which faults name it."""
    graph, memory = plan.graph, plan_memory(plan, dims)
    env = graph.environment(dims, rank)
    _check_rows(source, env, f"graph {graph.name}")
    a = np.zeros((), source.arguments.dtype)
    a["peer"] = places.peers
    for name in ("control", "status", "workspace", "trace", "wait_limit"):
        a[name] = getattr(places, name)
    a["event_capacity"] = capacity.events
    a["trace_capacity"] = places.trace_capacity
    a["shape"] = number
    for name, value in env.items():
        a[name] = value
    for name, base in memory.event_bases.items():
        a[event_base(graph.event(name))] = base
    for name, base in memory.queue_bases.items():
        a[name] = base
    for lane in plan.lanes:
        for call in lane.calls:
            a[units_name(call.name)] = int(lane.units(call).evaluate(env))
            a[pace_name(call.name)] = int(call.pace.evaluate(env))
    for name, offset in memory.symmetric.items():
        a[name] = capacity.tensors_offset + offset
    for name, offset in memory.local.items():
        a[name] = places.local + offset
    return a


def _check_rows(source: Source, env: Mapping[str, Any], where: str) -> None:
    for tensor, multiple in source.row_multiples.items():
        row = int(tensor.shape[-1].evaluate(env))
        if row % multiple:
            raise ArgumentError(
                f"a row of tensor {tensor.name} cannot be stored on a GPU",
                where=where,
                wanted=f"rows of a multiple of {multiple} elements (16 bytes)",
                got=f"{tensor.shape[-1]} = {row} elements of {tensor.dtype}",
                fix="pad the arrays, or choose another size",
            )


def bind(
    block: Block,
    plan: Plan,
    source: Source,
    pointers: Mapping[str, int],
    dims: Mapping[str, int],
    rank: int,
    encode: Encode,
) -> None:
    """Add the caller's arrays, and the tensor maps of all that bulk copies touch."""
    for name, pointer in pointers.items():
        block[name] = pointer
    env = plan.graph.environment(dims, rank)
    for m in source.arguments.maps:
        tensor, pointer = m.tensor, int(block[m.tensor.name])
        if tensor.kind == "symmetric":
            pointer += int(block["peer"][rank])
        shape = [int(s.evaluate(env)) for s in tensor.shape]
        block[m.name] = encode(pointer, shape, tensor.dtype, tensor.itemsize, m.box)
