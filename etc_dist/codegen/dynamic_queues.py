"""The index maps of a dynamic program's queues, as CUDA text: the groups of each call,
the elements that a task notifies, and the groups that an element releases.

kernels/queue/README.md describes their use on the device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from etc_dist.codegen.expression import linear, text
from etc_dist.codegen.layout import has_states
from etc_dist.codegen.members import COORD, GROUP, function, indexed, method, wrapped
from etc_dist.codegen.names import (
    axis_name,
    call_type,
    event_type,
    events_name,
    queue_name,
)
from etc_dist.ir.call import RANK, Call, row_major
from etc_dist.ir.event import EventRef, EventTensor
from etc_dist.ir.expr import Const, Expr, Op, Symbol, maximum, minimum, substitute
from etc_dist.ir.function import TENSOR, TRANSFER
from etc_dist.ir.graph import GraphFunction
from etc_dist.schedule.dynamic import is_positive
from etc_dist.schedule.plan import Lane, Plan

QUEUES = {TENSOR: "TensorQueue", TRANSFER: "TransferQueue"}
_OWNER = Symbol("owner", "task")
_GROUP = Symbol("group", "task")


def lane_queue(lane: Lane) -> str:
    """The struct of a lane's queue: its number of units and its position."""
    lines = [f"struct {QUEUES[lane.name]} {{"]
    words = ["head", "tail", "slots"]
    if any(call.limited is not None for call in lane.calls):
        words.append("surplus")
    has_surplus = int("surplus" in words)
    lines.append(f"  static constexpr int kHasSurplus = {has_surplus};")
    for name, count in (("units", "total"), ("initial", "initial")):
        lines += method(f"i32 {name}", f"g.{queue_name(lane.name, count)}")
    for word in words:
        lines += method(f"u32 {word}", f"u32(g.{queue_name(lane.name, word)})")
    return "\n".join([*lines, "};"])


def event_struct(plan: Plan, events: EventTensor) -> str:
    """The struct of an event tensor: the count that meets an element, on the rank that
    owns it."""
    target = f"u32({text(_on_owner(plan.graph, events.expects))})"
    axes = ", ".join(axis_name(axis.name) for axis in events.axes)
    lines = [f"struct {event_type(events.name)} {{"]
    lines.append(f"  struct Coord {{ {f'i32 {axes};' if axes else ''} }};")
    lines += method("u32 target", target, "const Args& g, i32 owner, Coord c")
    return "\n".join([*lines, "};"])


def queue_numbers(lane: Lane, call: Call) -> dict[str, int]:
    """The constants of a call that a queue needs; 0 if they are not given."""
    waits, is_queued = _waits(call), lane.queued(call)
    zeros = sum(1 << n for n, ref in enumerate(waits) if not is_positive(ref))
    return {
        "kQueued": int(is_queued),
        "kGating": len(lane.gating(call)),
        # Others may have more waits than a word has bits.
        "kMaybeZero": (zeros + 2**31) % 2**32 - 2**31 if is_queued else 0,
        "kWaitsForPeers": int(any(ref.events.cross_rank for ref in waits)),
    }


def call_members(lane: Lane, call: Call) -> Iterator[str]:
    """The members of a call's struct that a queue needs."""
    if lane.queued(call):
        gating = lane.gating(call)
        at = dict(zip(gating, row_major(gating, _GROUP), strict=True))
        place = ", ".join(text(at.get(axis, Const(0))) for axis in call.axes)
        if has_states(lane, call):
            state = f"u32(g.{queue_name(call.name, 'states')} + group)"
            yield from method("u32 state", state, GROUP)
        yield from method("Coord group_at", f"{{{place}}}", GROUP)
        if extents := [text(axis.extent) for axis in gating]:
            yield from indexed("i32 extent", extents, "const Args& g, int n")
    if call.notifies:
        place = f"{COORD}, F&& f"
        yield f"  template <int n, class F> ETC_DEVICE static void notified({place}) {{"
        for n, ref in enumerate(call.notifies):
            yield from wrapped(f"    if constexpr (n == {n}) {_notified(ref)}")
        yield "  }"


def _notified(ref: EventRef) -> str:
    rank = "g.rank" if ref.rank is None else text(ref.rank)
    index = ", ".join(text(part) for part in ref.index)
    event = event_type(ref.events.name)
    visit = f"f({event}{{}}, {rank}, {event}::Coord{{{index}}});"
    return f"if ({text(ref.holds)}) {visit}" if ref.guards else visit


@dataclass(frozen=True)
class _Release:
    """An element of `events` meets wait n of groups of a call."""

    events: EventTensor
    lane: Lane
    call: Call
    number: int
    ref: EventRef

    @property
    def name(self) -> str:
        return f"Release_{self.call.name}_{self.number}"


def releases(plan: Plan) -> Iterator[str]:
    """The structs of all releases, and their list for each event tensor."""
    release_structs = [
        _Release(ref.events, lane, call, n, ref)
        for lane in plan.lanes
        for call in filter(lane.queued, lane.calls)
        for n, ref in enumerate(_waits(call))
    ]
    for release in release_structs:
        yield _release_struct(plan.graph, release)
    lists = []
    for events in plan.graph.events:
        names = ", ".join(r.name for r in release_structs if r.events == events)
        head = f"template <> struct Releases<{event_type(events.name)}>"
        lists += wrapped(f"{head} : ReleaseList<{names}> {{}};")
    yield "\n".join(lists)


def _release_struct(graph: GraphFunction, release: _Release) -> str:
    ref, event = release.ref, event_type(release.events.name)
    gating = release.lane.gating(release.call)
    index = [_on_owner(graph, part) for part in ref.index]
    extents = {axis.symbol.name: axis.extent for axis in gating}
    spans = released(index, release.events.axes, extents)
    is_single = all(count == Const(1) for _, count in spans.values())
    base = f"{call_type(release.call.name)}, {release.number}, {int(is_single)}"
    lines = [f"struct {release.name} : ReleaseDefaults<{base}> {{"]
    texts = [f"{{{text(low)}, {text(count)}}}" for low, count in spans.values()]
    place = f"const Args& g, i32 owner, {event}::Coord c, int n"
    lines += indexed("Span span", texts, place)
    holds = _on_owner(graph, ref.holds)
    is_alike = [*index, holds] == [*ref.index, ref.holds]
    if not is_alike or ref.is_loaded or ref.expects.is_loaded:
        element = f"u32(g.{events_name(release.events.name)} + "
        element += f"{linear(index, release.events.shape, level=2)})"
        # NOTE: a loaded condition may not be known yet. Then a group for which it does
        # not hold is marked as well, which changes nothing: its wait is met.
        has_state = len(release.call.waits) > 1
        if ref.guards and not (ref.holds.is_loaded and has_state):
            element = f"{text(holds)} ? {element} : kNoElement"
        at = "    const auto c = Call::group_at(g, group);"
        rows = [at, *wrapped(f"    return {element};")]
        lines += function("u32 element", rows, "const Args& g, i32 owner, i32 group")
    return "\n".join([*lines, "};"])


Spans = dict[str, tuple[Expr, Expr]]
"""Coordinate name -> its least possible value, and the number of values from there."""


def released(
    index: list[Expr], element: tuple[Symbol, ...], extents: Mapping[str, Expr]
) -> Spans:
    """The groups whose wait for `index` is a wait for `element`, as a box: the possible
    values of each gating coordinate c. Exactly one if an index is c plus or minus an
    expression, also modulo n >= its extent, or max(c, bound) above the bound; several
    for c // n, or for max(c, bound) equal to the bound; else all values."""
    spans: Spans = {name: (Const(0), extent) for name, extent in extents.items()}
    for part, value in zip(index, element, strict=True):
        solution = _solve(part, value, Const(1), extents)
        if solution is None:
            continue
        name, low, count = solution
        if spans[name][1] != Const(1):
            spans[name] = low, count
    return spans


def _solve(
    part: Expr, low: Expr, count: Expr, extents: Mapping[str, Expr]
) -> tuple[str, Expr, Expr] | None:
    """The coordinate in `part`, and its possible values if `part` is in
    low .. low + count - 1; None if they cannot be derived."""
    if isinstance(part, Symbol):
        return (part.name, low, count) if part.name in extents else None
    if not isinstance(part, Op):
        return None
    left, right = part.left, part.right
    if _is_fixed(right):
        if part.name == "+":
            return _solve(left, low - right, count, extents)
        if part.name == "-":
            return _solve(left, low + right, count, extents)
        if part.name == "//" and isinstance(right, Const) and right.value > 0:
            return _solve(left, low * right, count * right, extents)
        if part.name == "%" and count == Const(1):
            return _solve_modulo(left, low, right, extents)
        if part.name == "max" and count == Const(1) and isinstance(left, Symbol):
            is_above = minimum(1, maximum(0, low - right))
            return _solve(left, is_above * low, 1 + (1 - is_above) * right, extents)
    elif _is_fixed(left):
        if part.name == "+":
            return _solve(right, low - left, count, extents)
        if part.name == "-":
            return _solve(right, left - low - count + 1, count, extents)
    return None


def _solve_modulo(
    part: Expr, value: Expr, modulus: Expr, extents: Mapping[str, Expr]
) -> tuple[str, Expr, Expr] | None:
    solution = _solve(part, value, Const(1), extents)
    if solution is None or solution[2] != Const(1):
        return None
    name, low, count = solution
    if not _at_most(extents[name], modulus):
        return None
    return name, low % modulus, count


def _at_most(extent: Expr, modulus: Expr) -> bool:
    """Whether `extent` is at most `modulus` for all dims."""
    if isinstance(extent, Const) and isinstance(modulus, Const):
        return extent.value <= modulus.value
    if isinstance(extent, Op) and extent.name == "-":
        is_less = isinstance(extent.right, Const) and extent.right.value >= 0
        return is_less and extent.left == modulus
    return extent == modulus


def _is_fixed(expr: Expr) -> bool:
    """Whether `expr` has no coordinate of the call."""
    return not any(s.kind == "coordinate" for s in expr.symbols)


def _waits(call: Call) -> tuple[EventRef, ...]:
    """The waits in the order of the generated `wait`."""
    return (*call.free_waits, *call.loaded_waits)


def _on_owner(graph: GraphFunction, expr: Expr) -> Expr:
    """`expr` on the rank `owner`, whose named numbers may differ."""
    values: dict[str, Expr] = {RANK.name: _OWNER}
    for symbol, value in graph.derived:
        if any(s.name in values for s in value.symbols):
            values[symbol.name] = substitute(value, values)
    return substitute(expr, values)
