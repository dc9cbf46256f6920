"""The argument block of a launch, filled in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from etc_dist.codegen import Source
from etc_dist.codegen.layout import (
    DIVISORS,
    FAR_SENDERS,
    FIRST_NEAR,
    FIRST_UNITS,
    FLAG_BYTES,
    PLACES,
    UNITS,
    periods,
    prepared_divisor,
)
from etc_dist.codegen.names import (
    address_name,
    dim_name,
    events_name,
    pace_name,
    queue_name,
)
from etc_dist.errors import ArgumentError
from etc_dist.ir.call import RANK
from etc_dist.ir.expr import Const, Expr
from etc_dist.ir.function import TmaBox
from etc_dist.runtime.memory_plan import Capacity, MemoryPlan, aligned, plan_memory
from etc_dist.runtime.region_checks import refuse_empty, refuse_rows
from etc_dist.schedule import Plan
from etc_dist.schedule.plan import QUEUE, WORKERS, Lane

Block = np.ndarray[Any, np.dtype[Any]]
Encode = Callable[[int, Sequence[int], str, int, TmaBox], Any]
"""(address, shape, dtype, bytes of an element, box) -> a tensor map's 128 bytes."""


@dataclass(frozen=True)
class Places:
    """Addresses of a rank's memory; a limit in nanoseconds, a capacity in records."""

    peers: Sequence[int]
    """Every rank's symmetric block; 0 for far ranks."""
    control: int
    status: int
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
    workers: int,
    number: int = 0,
) -> Block:
    """The block without the caller's arrays. `number` identifies the shape in fault
    records. ArgumentError for shapes that the CUDA bodies cannot run at."""
    graph, memory = plan.graph, plan_memory(plan, dims)
    env = graph.environment(dims, rank)
    refuse_rows(source.row_multiples, env, f"graph {graph.name}")
    refuse_empty(graph, env)
    integers = _integers(plan, env, capacity, places, memory)
    integers |= {"shape": number, RANK.name: rank}
    env[WORKERS.name] = workers
    integers |= {
        name: int(lane.period(loop).evaluate(env)) for name, lane, loop in periods(plan)
    }
    units = {
        f"units_{call.name}": int(lane.turn_units(call).evaluate(env))
        for lane in plan.lanes
        for call in lane.calls
    }
    numbers = {**integers, **units, **_totals(plan, env)}.items()
    large = {n: v for n, v in numbers if not -(2**31) <= v < 2**31}
    if large:
        raise _too_large(plan, dims, large)
    a = np.zeros((), source.arguments.dtype)
    first = rank - rank % plan.near
    a["peer"] = places.peers[first : first + plan.near]
    for name in PLACES:
        a[name] = getattr(places, name)
    if plan.has_far:
        a[FIRST_NEAR] = first
        for host in far_senders(plan, rank):
            a[FAR_SENDERS][host // 32] |= np.uint32(1 << host % 32)
    for name, value in integers.items():
        a[name] = value
    a[UNITS] = [units[f"units_{call.name}"] for call in graph.calls]
    for lane in _queued_lanes(plan):
        for call in lane.calls:
            first = int(lane.first_unit(call).evaluate(env))
            a[FIRST_UNITS][graph.calls.index(call)] = first
    for n, divisor in enumerate(source.arguments.divisors):
        a[DIVISORS][n] = prepared_divisor(_divisor_value(divisor, env))
    for name, offset in memory.symmetric.items():
        a[address_name(name)] = capacity.tensors_offset + offset
    for name, offset in memory.flagged.items():
        a[address_name(name)] = capacity.flags_offset + offset
    for name, offset in memory.local.items():
        a[address_name(name)] = places.local + offset
    return a


def _integers(
    plan: Plan,
    env: Mapping[str, Any],
    capacity: Capacity,
    places: Places,
    memory: MemoryPlan,
) -> dict[str, int]:
    """The members of 32 bits that are not those of a rank or of single calls."""
    integers = {
        "event_capacity": capacity.events,
        "trace_capacity": places.trace_capacity,
        **{dim_name(name): n for name, n in env.items() if name != RANK.name},
        **{events_name(name): at for name, at in memory.event_bases.items()},
        **memory.queue_bases,
    }
    if memory.flagged:
        integers[FLAG_BYTES] = aligned(capacity.flagged)
    paced = (call for call in plan.graph.calls if call.pace != Const(0))
    integers |= {pace_name(c.name): int(c.pace.evaluate(env)) for c in paced}
    for lane in _queued_lanes(plan):
        for word, count in (("total", lane.total), ("initial", lane.initial)):
            integers[queue_name(lane.name, word)] = int(count.evaluate(env))
    return integers


def _totals(plan: Plan, env: dict[str, Any]) -> dict[str, int]:
    """The units of each lane, and of one wave more, of which a worker may have the
    number of its next one."""
    return {
        f"units of lane {lane.name}": int((lane.total + WORKERS).evaluate(env))
        for lane in plan.lanes
    }


def _queued_lanes(plan: Plan) -> list[Lane]:
    return [lane for lane in plan.lanes if lane.policy == QUEUE]


def _divisor_value(divisor: Expr, env: Mapping[str, Any]) -> int:
    """0 for a divisor that itself divides by zero: tasks select another expression."""
    try:
        return int(divisor.evaluate(env))
    except ZeroDivisionError:
        return 0


def far_senders(plan: Plan, rank: int) -> list[int]:
    """The hosts whose partner of `rank` may send to it.

    NOTE: at any dims, as these partners count the epochs of the program."""
    graph, hosts = plan.graph, []
    near = graph.local_size
    to = [c.writes[0].rank for c in graph.calls if c.function.far]
    for host in range(graph.world_size // near):
        if host == rank // near:
            continue
        env = {RANK.name: host * near + rank % near}
        for rank_expr in to:
            assert rank_expr is not None
            is_known = all(symbol.name in env for symbol in rank_expr.symbols)
            if not is_known or rank_expr.is_loaded or rank_expr.evaluate(env) == rank:
                hosts.append(host)
                break
    return hosts


def _too_large(
    plan: Plan, dims: Mapping[str, int], large: Mapping[str, int]
) -> ArgumentError:
    return ArgumentError(
        f"the arrays are too large for {plan.graph.name} on GPUs",
        where=f"{plan.graph.name}, {', '.join(f'{k}={v}' for k, v in dims.items())}",
        wanted="dims, numbers of tasks and offsets of events with absolute values "
        "below 2147483648, as indices on GPUs have 32 bits",
        got=", ".join(f"{n.removeprefix('dim_')} = {v}" for n, v in large.items()),
        fix="split the call into several, along the largest axis",
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
    """Add the caller's arrays, and the tensor maps of all bulk copies."""
    for name, pointer in pointers.items():
        block[address_name(name)] = pointer
    env = plan.graph.environment(dims, rank)
    for m in source.arguments.maps:
        tensor, pointer = m.tensor, int(block[address_name(m.tensor.name)])
        if tensor.kind == "symmetric":
            pointer += int(block["peer"][rank % source.arguments.near])
        shape = [int(s.evaluate(env)) for s in tensor.shape]
        if tensor.has_own_rows and shape[0] == 0:
            continue  # no task copies any
        block[m.name] = encode(
            pointer, shape, tensor.dtype, tensor.itemsize, m.box.at(env)
        )
