"""The index maps of a dynamic program's queues, as CUDA text: the groups of each call,
the elements that a task notifies, and the groups that an element releases.

docs/protocol.md, "Dynamic schedules", describes their use on the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from etc_dist.codegen.expression import linear, text
from etc_dist.codegen.layout import has_states, notification_unit
from etc_dist.codegen.members import indexed, method
from etc_dist.codegen.names import (
    axis_name,
    call_type,
    event_type,
    events_name,
    queue_name,
)
from etc_dist.ir.call import RANK, Call, row_major
from etc_dist.ir.event import EventRef, EventTensor
from etc_dist.ir.expr import (
    Const,
    Expr,
    Op,
    Symbol,
    maximum,
    minimum,
    substitute,
)
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
    lines.append(method("i32 units", text(lane.total)))
    lines.append(method("i32 initial", text(lane.initial)))
    for word in ("head", "tail", "slots"):
        lines.append(method(f"u32 {word}", f"u32(g.{queue_name(lane.name, word)})"))
    has_surplus = any(call.limited is not None for call in lane.calls)
    lines.append(f"  static constexpr int kHasSurplus = {int(has_surplus)};")
    if has_surplus:
        surplus = f"u32(g.{queue_name(lane.name, 'surplus')})"
        lines.append(method("u32 surplus", surplus))
    return "\n".join([*lines, "};"])


def event_struct(plan: Plan, events: EventTensor) -> str:
    """The struct of an event tensor: the position of an element's counter, and the
    count that meets it, on the rank that owns it."""
    expects = text(_on_owner(plan.graph, events.expects))
    target = f"u32({expects}) * {notification_unit(plan, events)}u"
    axes = (
        f" i32 {', '.join(axis_name(a.name) for a in events.axes)};"
        if events.axes
        else ""
    )
    lines = [f"struct {event_type(events.name)} {{", f"  struct Coord {{{axes} }};"]
    lines.append(method("u32 index", _index(events, events.axes), "Coord c"))
    lines.append(method("u32 target", target, "i32 owner, Coord c"))
    return "\n".join([*lines, "};"])


def call_members(lane: Lane, call: Call) -> list[str]:
    """The members of a call's struct that a queue needs."""
    gating, waits = lane.gating(call), _waits(call)
    maybe_zero = 0
    if lane.queued(call):  # others may have more waits than a word has bits
        zeros = (n for n, r in enumerate(waits) if not is_positive(r))
        maybe_zero = sum(1 << n for n in zeros)
    lines = [f"  using Queue = {QUEUES[lane.name]};"]
    lines.append(f"  static constexpr int kQueued = {int(lane.queued(call))};")
    for_peers = any(r.events.cross_rank for r in waits)
    lines.append(f"  static constexpr int kWaitsForPeers = {int(for_peers)};")
    lines.append(f"  static constexpr int kGating = {len(gating)};")
    lines.append(f"  static constexpr u32 kMaybeZero = {maybe_zero}u;")
    lines.append(method("i32 groups", text(lane.groups(call))))
    lines.append(method("i32 group_size", text(lane.group_size(call))))
    lines.append(method("i32 group_units", text(lane.group_units(call))))
    lines.append(method("i32 first_unit", text(lane.first_unit(call))))
    if lane.queued(call):
        at = dict(zip(gating, row_major(gating, _GROUP), strict=True))
        place = ", ".join(text(at.get(axis, Const(0))) for axis in call.axes)
        if has_states(lane, call):
            state = f"u32(g.{queue_name(call.name, 'states')} + group)"
            lines.append(method("u32 state", state, "i32 group"))
        lines.append(method("Coord group_at", f"{{{place}}}", "i32 group"))
        extents = [text(axis.extent) for axis in gating]
        lines += indexed("i32 extent", extents, "const Args& g, int n")
    lines.append("  template <int n, class F>")
    lines.append("  ETC_DEVICE static void notified(const Args& g, Coord c, F&& f) {")
    for n, ref in enumerate(call.notifies):
        rank = "g.rank" if ref.rank is None else text(ref.rank)
        index = ", ".join(text(part) for part in ref.index)
        event = event_type(ref.events.name)
        call_f = f"f({event}{{}}, {rank}, {event}::Coord{{{index}}});"
        if ref.guards:
            call_f = f"if ({text(ref.holds)}) {call_f}"
        lines.append(f"    if constexpr (n == {n}) {call_f}")
    return [*lines, "  }"]


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
    found = [
        _Release(ref.events, lane, call, n, ref)
        for lane in plan.lanes
        for call in filter(lane.queued, lane.calls)
        for n, ref in enumerate(_waits(call))
    ]
    for release in found:
        yield _release_struct(plan.graph, release)
    for events in plan.graph.events:
        names = ", ".join(r.name for r in found if r.events == events)
        head = f"template <> struct Releases<{event_type(events.name)}>"
        yield f"{head} : ReleaseList<{names}> {{}};"


def _release_struct(graph: GraphFunction, release: _Release) -> str:
    ref, event = release.ref, event_type(release.events.name)
    gating = release.lane.gating(release.call)
    index = [_on_owner(graph, part) for part in ref.index]
    extents = {axis.symbol.name: axis.extent for axis in gating}
    spans = released(index, release.events.axes, extents)
    single = all(count == Const(1) for _, count in spans.values())
    lines = [f"struct {release.name} {{"]
    lines.append(f"  using Call = {call_type(release.call.name)};")
    lines.append(f"  static constexpr int kWait = {release.number};")
    lines.append(f"  static constexpr int kInvertible = {int(single)};")
    texts = [f"{{{text(low)}, {text(count)}}}" for low, count in spans.values()]
    place = f"const Args& g, i32 owner, {event}::Coord c, int n"
    lines += indexed("Span span", texts, place)
    lines.append(
        "  ETC_DEVICE static u32 element(const Args& g, i32 owner, i32 group) {"
    )
    lines.append("    const auto c = Call::group_at(g, group);")
    element = _index(release.events, index)
    # NOTE: a loaded condition may not be known yet. Then a group for which it does not
    # hold is marked as well, which changes nothing: its wait is met.
    has_state = len(release.call.waits) > 1
    if ref.guards and not (ref.holds.is_loaded and has_state):
        element = f"{text(_on_owner(graph, ref.holds))} ? {element} : kNoElement"
    lines.append(f"    return {element};")
    return "\n".join([*lines, "  }", "};"])


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
        found = _solve(part, value, Const(1), extents)
        if found is None:
            continue
        name, low, count = found
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
    found = _solve(part, value, Const(1), extents)
    if found is None or found[2] != Const(1):
        return None
    name, low, count = found
    if not _at_most(extents[name], modulus):
        return None
    return name, low % modulus, count


def _at_most(extent: Expr, modulus: Expr) -> bool:
    """Whether `extent` is at most `modulus` for all dims."""
    if isinstance(extent, Const) and isinstance(modulus, Const):
        return extent.value <= modulus.value
    if isinstance(extent, Op) and extent.name == "-":
        less = isinstance(extent.right, Const) and extent.right.value >= 0
        return less and extent.left == modulus
    return extent == modulus


def _is_fixed(expr: Expr) -> bool:
    """Whether `expr` has no coordinate of the call."""
    return not any(s.kind == "coordinate" for s in expr.symbols())


def _waits(call: Call) -> tuple[EventRef, ...]:
    """The waits in the order of the generated `wait`."""
    return (*call.free_waits, *call.loaded_waits)


def _on_owner(graph: GraphFunction, expr: Expr) -> Expr:
    """`expr` on the rank `owner`, whose named numbers may differ."""
    values: dict[str, Expr] = {RANK.name: _OWNER}
    for symbol, value in graph.derived:
        if any(s.name in values for s in value.symbols()):
            values[symbol.name] = substitute(value, values)
    return substitute(expr, values)


def _index(events: EventTensor, index: tuple[Expr, ...] | list[Expr]) -> str:
    return f"u32(g.{events_name(events.name)} + {linear(index, events.shape)})"
