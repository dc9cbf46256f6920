"""The layouts that host and device share: argument, symmetric and control block.

`kernels/event/layout.cuh` and `kernels/worker/trace.cuh` have the same layouts. The
generated source asserts the sizes of the argument block and of shared memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any

import numpy as np

from etc_dist.codegen.expression import fixed_divisors
from etc_dist.codegen.members import wrapped
from etc_dist.codegen.names import (
    address_name,
    dim_name,
    events_name,
    pace_name,
    period_name,
    queue_name,
)
from etc_dist.ir.call import RANK, Call
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
PLACES = ("control", "status", "trace", "wait_limit")
UNSIGNED = ("event_capacity", "trace_capacity", "shape")
FLAG_BYTES = "flag_bytes"
"""The bytes of an area of flagged tensors."""
UNITS, FIRST_UNITS, DIVISORS = "units", "first_units", "divisor"
"""The arrays of the units of each call, in a loop in one turn, of the numbers of the
first ones in a queue, and of the divisors."""


@dataclass(frozen=True)
class Map:
    """A tensor map argument: bulk copies of `box` from or to `tensor`."""

    name: str
    tensor: Tensor
    box: TmaBox


@dataclass(frozen=True)
class Arguments:
    """The argument block of a program: tensor maps, addresses, and integers."""

    maps: tuple[Map, ...]
    addresses: tuple[str, ...]
    integers: tuple[str, ...]
    divisors: tuple[Expr, ...]
    """Numbers that the host prepares to divide by, see `prepared_divisor`."""
    has_queues: bool
    num_calls: int
    world_size: int
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
        integers = [RANK.name, *(dim_name(s.name) for s in graph.dims)]
        integers += [dim_name(s.name) for s in (graph.own_dims or ())[:1]]
        integers += [dim_name(s.name) for s, _ in graph.derived]
        integers += [events_name(events.name) for events in graph.events]
        integers += [name for name, _, _ in periods(plan)]
        integers += [name for name, _ in queue_words(plan)]
        integers += [pace_name(c.name) for c in graph.calls if c.pace != Const(0)]
        integers += [FLAG_BYTES] if any(t.flagged for t in graph.tensors) else []
        addresses = [address_name(t.name) for t in graph.tensors]
        queued = [lane for lane in plan.lanes if lane.policy == QUEUE]
        for lane in queued:
            integers += [queue_name(lane.name, count) for count in ("total", "initial")]
        divisors = [e for e in _divisors(plan) if not isinstance(e, Const)]
        unique = tuple(dict.fromkeys(divisors))
        return cls(
            _maps(plan),
            tuple(addresses),
            tuple(integers),
            unique,
            bool(queued),
            len(graph.calls),
            graph.world_size,
            plan.near,
            plan.far_hosts,
        )

    @property
    def divisor_texts(self) -> dict[Expr, str]:
        """The C++ text of each."""
        return {expr: f"g.divisor[{n}]" for n, expr in enumerate(self.divisors)}

    def divisor_text(self, expr: Expr) -> str:
        """The C++ text of a prepared divisor: an argument, or for a Const a literal."""
        if isinstance(expr, Const):
            factor, shift = prepared_divisor(expr.value)
            return f"{{{factor}, {shift}}}"
        return self.divisor_texts[expr]

    def map_of(self, tensor: Tensor, box: TmaBox) -> str:
        """The name of the TMA descriptor of a tensor with a box."""
        # By hash: == refuses to compare a number of rows with an expression.
        return {(m.tensor, m.box): m.name for m in self.maps}[tensor, box]

    def _rows(self) -> Iterator[tuple[str, list[Any]]]:
        """The declarations of the C++ struct, each with its fields in NumPy."""

        def row(kind: str, names: Iterable[str], *field: Any) -> tuple[str, list[Any]]:
            return f"{kind} {', '.join(names)}", [(name, *field) for name in names]

        yield row("TensorMap", [m.name for m in self.maps], "u1", MAP_BYTES)
        peers = ("peer", "u8", (self.near,))
        if self.far_hosts:
            yield f"NearBlocks<{self.near}> peer", [peers, (FIRST_NEAR, "u8")]
        else:
            yield "u64 peer[kWorld]", [peers]
        yield row("u64", PLACES, "u8")
        yield row("u64", self.addresses, "u8")
        yield row("u32", UNSIGNED, "i4")
        for _, names in groupby(self.integers, lambda name: name.partition("_")[0]):
            yield row("i32", [*names], "i4")
        for name in (UNITS, *([FIRST_UNITS] if self.has_queues else [])):
            yield f"i32 {name}[{self.num_calls}]", [(name, "i4", (self.num_calls,))]
        if num_divisors := len(self.divisors):
            yield (
                f"Divisor {DIVISORS}[{num_divisors}]",
                [(DIVISORS, "u4", (num_divisors, 2))],
            )
        if number := self.sender_words:
            yield f"u32 {FAR_SENDERS}[{number}]", [(FAR_SENDERS, "u4", (number,))]

    @property
    def dtype(self) -> np.dtype[Any]:
        """The block as a structured NumPy dtype, as CuPy passes it by value."""
        names, formats, sizes = [], [], [0]
        for _, fields in self._rows():
            for name, *kind in fields:
                names.append(name)
                formats.append(tuple(kind) if len(kind) > 1 else kind[0])
                sizes.append(np.dtype(formats[-1]).itemsize)
        *offsets, end = accumulate(sizes)
        unit = MAP_BYTES if self.maps else 8
        return np.dtype(
            {
                "names": names,
                "formats": formats,
                "offsets": offsets,
                "itemsize": -(-end // unit) * unit,
            }
        )

    def text(self) -> str:
        """The same block as a C++ struct."""
        lines = ["struct Args {", f"  static constexpr int kWorld = {self.world_size};"]
        for declaration, fields in self._rows():
            lines += wrapped(f"  {declaration};") if fields else []
        lines += ["};", f"static_assert(sizeof(Args) == {self.dtype.itemsize});"]
        return "\n".join(lines)


def prepared_divisor(value: int) -> tuple[int, int]:
    """(factor, shift) with n // value == (2 n * factor >> 32) >> shift for all n from 0
    to 2**31 - 1. (0, 0), which gives 0, for larger values, and for those that are not
    positive, by which nothing is divided (Granlund and Montgomery, PLDI 1994).

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
                yield lane.group_size(call)
        yield from (lane.period(loop) for loop in loops_in(lane.items))


def periods(plan: Plan) -> Iterator[tuple[str, Lane, Loop]]:
    """The arguments for the units of one turn of each loop of each lane."""
    for lane in plan.lanes:
        for loop in loops_in(lane.items):
            yield period_name(lane.name, loop.name), lane, loop


def queue_words(plan: Plan) -> Iterator[tuple[str, Expr]]:
    """The parts of a plan's queues, with the number of words of each."""
    one_word = Const(1)
    for lane in plan.lanes:
        if lane.policy != QUEUE:
            continue
        is_limited = any(call.limited is not None for call in lane.calls)
        for part in ("head", "tail", *["surplus"] * is_limited):
            yield queue_name(lane.name, part), one_word
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


def _maps(plan: Plan) -> tuple[Map, ...]:
    map_by_box: dict[tuple[Tensor, TmaBox], Map] = {}
    for lane in plan.lanes:
        for call in lane.calls:
            regions = (*call.reads, *call.writes)
            for operand, boxes in call.function.boxes.items():
                tensor = regions[operand].tensor
                for box in boxes.small_and_large:
                    name = f"map_{tensor.name}_{box.rows}x{box.columns}"
                    map_by_box.setdefault((tensor, box), Map(name, tensor, box))
    return tuple(map_by_box.values())
