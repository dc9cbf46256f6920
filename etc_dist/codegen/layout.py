"""The layouts that host and device share: argument, symmetric and control block.

`kernels/event/layout.cuh` and `kernels/worker/trace.cuh` have the same layouts. The
generated source asserts the sizes of the argument block and of shared memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from etc_dist.codegen.expression import fixed_divisors
from etc_dist.codegen.names import (
    dim_name,
    divisor_name,
    events_name,
    pace_name,
    period_name,
    queue_name,
    tensor_name,
    units_name,
)
from etc_dist.ir.call import Call
from etc_dist.ir.event import EventTensor
from etc_dist.ir.expr import Const, Expr
from etc_dist.ir.function import SCRATCH_BYTES, TENSOR, TmaBox
from etc_dist.ir.tensor import Tensor
from etc_dist.schedule.loops import Loop, loops_in
from etc_dist.schedule.plan import QUEUE, Lane, Plan

MAX_SHARED_BYTES = 232448
"""Shared memory that a worker may have."""
MOST_STAGE_OFFSET = 2048
"""Where the ring of stages begins, at most; before it lie mbarriers and work items."""
HEAD_BYTES = 1024
ABORT_OFFSET = 256
ALIGNMENT = 1024

MAX_FAULTS = 64
FAULT = np.dtype(
    [
        (n, "u4")
        for n in ("worker", "lane", "call", "task", "event", "index", "have", "want")
    ]
)
CONTROL = np.dtype(
    [
        ("epoch", "u4"),
        ("begun", "u4"),
        ("tickets", "u4", (2, 2)),
        ("faults", "u4"),
        ("shape", "u4"),
        ("resident", "u4"),
        ("ended", "u4"),
        ("unused", "u4", 6),
        ("fault", FAULT, MAX_FAULTS),
    ]
)
EVENT_WAIT, PEER_START, INSIDE_WORKER, OUT_OF_RANGE = range(4)

TRACE_WARPS = 12
TRACE_RECORD = np.dtype(
    [
        ("begin", "u8"),
        ("end", "u8"),
        ("lane", "u4"),
        ("call", "u4"),
        ("task", "u4"),
        ("empty", "u4"),
    ]
)

MAP_BYTES = 128
FAR_SENDERS = "far_senders"
"""The argument with a bit for each host whose partner may send to this rank."""
FIRST_NEAR = "first_near"
"""The argument for the lowest rank of this host."""
UNSIGNED = ("event_capacity", "trace_capacity", "shape")
"""Arguments of type u32."""


@dataclass(frozen=True)
class Map:
    """A tensor map argument: bulk copies of `box` from or to `tensor`."""

    name: str
    tensor: Tensor
    box: TmaBox


@dataclass(frozen=True)
class Arguments:
    """The argument block of a program: tensor maps, then addresses, integers and
    divisors."""

    maps: tuple[Map, ...]
    addresses: tuple[str, ...]
    integers: tuple[str, ...]
    divisors: tuple[Expr, ...]
    """Numbers that the host prepares to divide by, see `prepared_divisor`."""
    near: int
    """The number of ranks that map each other's memory."""
    far_hosts: int
    """The number of hosts in a program with far ranks, else 0."""

    @property
    def sender_words(self) -> int:
        """The number of words of `FAR_SENDERS`; 0 without far ranks."""
        return -(-self.far_hosts // 32)

    @classmethod
    def of(cls, plan: Plan) -> Arguments:
        """The arguments of a plan's kernel."""
        graph = plan.graph
        integers = ["event_capacity", "trace_capacity", "shape", "rank"]
        integers += [dim_name(s.name) for s in graph.dims]
        integers += [dim_name(s.name) for s, _ in graph.derived]
        integers += [events_name(events.name) for events in graph.events]
        calls = [c.name for lane in plan.lanes for c in lane.calls]
        integers += [name(call) for name in (units_name, pace_name) for call in calls]
        integers += [name for name, _, _ in periods(plan)]
        integers += [name for name, _ in queue_words(plan)]
        addresses = ["control", "status", "workspace", "trace", "wait_limit"]
        addresses += [tensor_name(t.name) for t in graph.tensors]
        hosts = plan.near, plan.far_hosts
        divisors = [e for e in _divisors(plan) if not isinstance(e, Const)]
        unique = tuple(dict.fromkeys(divisors))
        return cls(_maps(plan), tuple(addresses), tuple(integers), unique, *hosts)

    @property
    def divisor_names(self) -> dict[Expr, str]:
        """The names of the prepared divisors."""
        return {expr: divisor_name(n) for n, expr in enumerate(self.divisors)}

    @property
    def divisor_texts(self) -> dict[Expr, str]:
        """The C++ text of each."""
        return {expr: f"g.{name}" for expr, name in self.divisor_names.items()}

    def divisor_text(self, expr: Expr) -> str:
        """The C++ text of a prepared divisor: an argument, or for a Const a literal."""
        if isinstance(expr, Const):
            factor, shift = prepared_divisor(expr.value)
            return f"Divisor{{{factor}, {shift}}}"
        return self.divisor_texts[expr]

    def map_of(self, tensor: Tensor, box: TmaBox) -> str:
        """The name of the TMA descriptor of a tensor with a box."""
        # By hash: == refuses to compare a number of rows with an expression.
        return {(m.tensor, m.box): m.name for m in self.maps}[tensor, box]

    @property
    def dtype(self) -> np.dtype[Any]:
        """The block as a structured NumPy dtype, as CuPy passes it by value."""
        names: list[str] = []
        formats: list[Any] = []
        offsets: list[int] = []
        at = 0
        for m in self.maps:
            names.append(m.name)
            formats.append(("u1", MAP_BYTES))
            offsets.append(at)
            at += MAP_BYTES
        senders = self.sender_words
        groups: list[tuple[Any, Sequence[str]]] = [
            (("u8", self.near), ["peer"]),
            ("u8", [FIRST_NEAR] if senders else []),
            ("u8", self.addresses),
            ("i4", self.integers),
            (("u4", 2), list(self.divisor_names.values())),
            (("u4", senders), [FAR_SENDERS] if senders else []),
        ]
        for kind, group in groups:
            for name in group:
                names.append(name)
                formats.append(kind)
                offsets.append(at)
                at += np.dtype(kind).itemsize
        unit = MAP_BYTES if self.maps else 8
        return np.dtype(
            {
                "names": names,
                "formats": formats,
                "offsets": offsets,
                "itemsize": -(-at // unit) * unit,
            }
        )

    def text(self) -> str:
        """The same block as a C++ struct."""
        lines = ["struct Args {"]
        lines += [f"  TensorMap {m.name};" for m in self.maps]
        senders = self.sender_words
        lines.append(
            f"  {'NearBlocks<kNear> peer' if senders else 'u64 peer[kWorld]'};"
        )
        lines += [f"  u64 {name};" for name in self.addresses]
        for name in self.integers:
            kind = "u32" if name in UNSIGNED else "i32"
            lines.append(f"  {kind} {name};")
        lines += [f"  Divisor {name};" for name in self.divisor_names.values()]
        if senders:
            lines.append(f"  u32 {FAR_SENDERS}[{senders}];")
        lines += ["};", f"static_assert(sizeof(Args) == {self.dtype.itemsize});"]
        return "\n".join(lines)


def prepared_divisor(value: int) -> tuple[int, int]:
    """(factor, shift) with n // value == (2 n * factor >> 32) >> shift for all n from 0
    to 2**31 - 1. (0, 0), which gives 0, for larger values, and for those that are not
    positive, by which nothing is divided.

    With value <= 2**shift, factor is 2**(31 + shift) / value, rounded up: too large by
    less than 1. So n * factor / 2**(31 + shift) exceeds n / value by less than
    2**31 / 2**(31 + shift) <= 1 / value, which changes no quotient."""
    if not 0 < value < 2**31:
        return 0, 0
    shift = (value - 1).bit_length()
    return -(-(1 << 31 + shift) // value), shift


def _divisors(plan: Plan) -> Iterator[Expr]:
    for lane in plan.lanes:
        for call in lane.calls:
            yield from fixed_divisors(call)
            if lane.has_loops or lane.policy == QUEUE:
                yield lane.group_units(call)
        yield from (lane.period(loop) for loop in loops_in(lane.items))


def periods(plan: Plan) -> Iterator[tuple[str, Lane, Loop]]:
    """The arguments for the units of one turn of each loop of each lane."""
    for lane in plan.lanes:
        for loop in loops_in(lane.items):
            yield period_name(lane.name, loop.name), lane, loop


def queue_words(plan: Plan) -> Iterator[tuple[str, Expr]]:
    """The parts of a plan's queues, with the number of words of each."""
    one = Const(1)
    for lane in plan.lanes:
        if lane.policy != QUEUE:
            continue
        is_limited = any(call.limited is not None for call in lane.calls)
        for part in ("head", "tail", *["surplus"] * is_limited):
            yield queue_name(lane.name, part), one
        yield queue_name(lane.name, "slots"), lane.total - lane.initial
        for call in lane.calls:
            if has_states(lane, call):
                yield queue_name(call.name, "states"), lane.groups(call)


def has_states(lane: Lane, call: Call) -> bool:
    """Whether each group of `call` has a word with a bit for each wait that is met. The
    groups of a single wait are ready at once."""
    return lane.queued(call) and len(call.waits) > 1


def shared_memory(plan: Plan) -> tuple[int, int]:
    """Bytes of a worker's shared memory, and of the buffer at its end: the scratch
    memory of bodies, and what functions with roles declare as `shared`. If any function
    has roles, the ring of stages gets the rest."""
    functions = [call.function for call in plan.lane(TENSOR).calls]
    needs = [f.shared if f.roles else max(f.shared, SCRATCH_BYTES) for f in functions]
    buffer = -(-max(needs, default=SCRATCH_BYTES) // ALIGNMENT) * ALIGNMENT
    has_roles = any(f.roles for f in functions)
    return MAX_SHARED_BYTES if has_roles else MOST_STAGE_OFFSET + buffer, buffer


def notification_unit(plan: Plan, events: EventTensor) -> int:
    """Counter increments per notification of `events`: a multiple of the parts of all
    device functions that notify it."""
    unit = 1
    for call in plan.graph.calls:
        if any(ref.events == events for ref in call.notifies):
            unit = int(np.lcm(unit, call.function.parts))
    return unit


def _maps(plan: Plan) -> tuple[Map, ...]:
    found: dict[tuple[Tensor, TmaBox], Map] = {}
    for lane in plan.lanes:
        for call in lane.calls:
            regions = (*call.reads, *call.writes)
            for operand, boxes in call.function.boxes.items():
                tensor = regions[operand].tensor
                for box in boxes.small_and_large:
                    kind = "halves" if box.halves else "map"
                    name = f"{kind}_{tensor.name}_{box.rows}x{box.columns}"
                    found.setdefault((tensor, box), Map(name, tensor, box))
    return tuple(found.values())
