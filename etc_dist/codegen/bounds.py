"""Range checks of loaded values, and of 32-bit arithmetic on them, as CUDA expressions
that must all be true.

NOTE: each `load_index` in the text is a load. So a value is compared once, as an
unsigned number: a negative one is too large.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypeGuard

from etc_dist.codegen.expression import condition_text, text, wide
from etc_dist.ir.call import RANK, Call
from etc_dist.ir.event import EventRef
from etc_dist.ir.expr import Const, Expr, Load, Op, Select
from etc_dist.ir.guard import Guard
from etc_dist.ir.loads import may_overflow, notifier_counts
from etc_dist.ir.tensor import Region


class Condition(NamedTuple):
    """A condition in CUDA that an index expression is in range."""

    text: str
    depth: int
    """Those of smaller depth must be true before it can be evaluated: they check its
    loads, its operands and its divisors."""


def conjunction(conditions: Iterable[Condition]) -> str:
    """All of `conditions`. Conditions of equal depth are evaluated together, after
    those of smaller depth."""
    stages: dict[int, list[str]] = {}
    for condition in conditions:
        stages.setdefault(condition.depth, []).append(f"({condition.text})")
    joined = [" & ".join(stages[depth]) for depth in sorted(stages)]
    return " &&\n        ".join(joined or ["true"])


def waits_in_range(call: Call) -> Iterable[Condition]:
    """The range checks of the loaded waits."""
    return dict.fromkeys(c for ref in call.loaded_waits for c in _wait(ref))


def in_range(call: Call, world: int, has_far: bool = False) -> Iterable[Condition]:
    """The range checks of loaded accesses and notifications. has_far: on other hosts
    there are at most the partners of far functions."""
    regions = (*call.reads, *call.writes)
    accessed = (c for region in regions for c in _region(region, world))
    notified = (c for ref in call.notifies for c in _notified(ref, world))
    ranks = [region.rank for region in regions] + [*map(_rank_of, call.notifies)]
    reached = (c for r in ranks if has_far for c in _reached(r, call.function.far))
    return dict.fromkeys([*accessed, *notified, *reached])


def _wait(ref: EventRef) -> Iterator[Condition]:
    yield from _element(ref)
    yield from _loads(ref.expects)


def _notified(ref: EventRef, world: int) -> Iterator[Condition]:
    yield from _element(ref)
    yield from _rank(_rank_of(ref), world)
    for count in notifier_counts(ref):
        yield from _loads(count)


def _rank_of(ref: EventRef) -> Expr | None:
    """The rank of a notification, this one if there is none."""
    return None if ref.rank is None else ref.guarded(ref.rank, RANK)


def _element(ref: EventRef) -> Iterator[Condition]:
    if not ref.is_loaded:
        return
    yield from _loads(ref.holds)
    for part, extent in zip(ref.index, ref.events.shape, strict=True):
        conditions = [*_loads(part, is_compared=True), *_below(part, extent)]
        for guard in reversed(ref.guards):
            conditions = [*_where(guard, conditions)]
        yield from conditions


def _region(region: Region, world: int) -> Iterator[Condition]:
    """NOTE: a start without loads may lie beyond the edge: then the region is empty.
    The verifier proves that it is not negative."""
    parts = zip(
        region.start, region.size, region.tensor.shape, region.kept, strict=True
    )
    for start, size, extent, kept in parts:
        yield from _loads(start, is_compared=True)
        yield from _loads(size)
        if start.is_loaded:
            yield from _below(start, extent, "<=" if kept else "<")
    yield from _rank(region.rank, world)


def _rank(rank: Expr | None, world: int) -> Iterator[Condition]:
    if rank is not None and rank.is_loaded:
        yield from _loads(rank, is_compared=True)
        yield from _below(rank, Const(world))


def _reached(rank: Expr | None, far: bool) -> Iterator[Condition]:
    if rank is not None and rank.is_loaded:
        check = f"reaches({text(rank)}, g.rank)" if far else f"has({text(rank)})"
        yield Condition(f"g.peer.{check}", _depth_of_use(rank))


def _loads(expr: Expr, is_compared: bool = False) -> Iterator[Condition]:
    """The range checks of each load in `expr`, inner ones first; loaded divisors must
    not be zero, and intermediate results must have 32 bits. `is_compared`: another
    condition compares the value of `expr`."""
    if isinstance(expr, Select):
        yield from _selected(expr)
        return
    for child in expr.children():
        yield from _loads(child, isinstance(expr, Load))
    if isinstance(expr, Load):
        for index, extent in zip(expr.index, expr.shape, strict=True):
            yield from _below(index, extent)
    if _has_loaded_divisor(expr):
        yield Condition(f"{text(expr.right)} != 0", _depth_of_use(expr.right))
    if isinstance(expr, Op) and may_overflow(expr) and not is_compared:
        yield Condition(f"fits_i32({wide(expr)})", _depth(expr))


def _selected(expr: Select) -> Iterator[Condition]:
    """The conditions of a selection: those of each choice hold where it is chosen."""
    operands = (expr.condition.left, expr.condition.right)
    for operand in operands:
        yield from _loads(operand)
    for choice, holds in ((expr.then, True), (expr.other, False)):
        yield from _where((expr.condition, holds), _loads(choice))


def _where(guard: Guard, conditions: Iterable[Condition]) -> Iterator[Condition]:
    """`conditions` for tasks for which `guard` is met."""
    comparison, holds = guard
    depth = max(map(_depth_of_use, (comparison.left, comparison.right)))
    condition = condition_text(comparison)
    excuse = f"!{condition}" if holds else condition
    for inner in conditions:
        yield Condition(f"{excuse} || ({inner.text})", max(inner.depth, depth))


def _has_loaded_divisor(expr: Expr) -> TypeGuard[Op]:
    return isinstance(expr, Op) and expr.name in ("//", "%") and expr.right.is_loaded


def _below(value: Expr, extent: Expr, relation: str = "<") -> Iterator[Condition]:
    known = isinstance(value, Const) and isinstance(extent, Const)
    if isinstance(value, Op) and value.is_loaded:
        compared = f"u64({wide(value)}) {relation} u64({text(extent)})"
        yield Condition(compared, _depth(value))
    elif not known:  # the proof covers constants
        compared = f"u32({text(value)}) {relation} u32({text(extent)})"
        yield Condition(compared, _depth(value))


def _depth(expr: Expr) -> int:
    """The depth of conditions on the value of `expr`."""
    if isinstance(expr, Load):
        return 1 + max(map(_depth, expr.children()), default=0)
    inner = max(map(_depth_of_use, expr.children()), default=0)
    if _has_loaded_divisor(expr):
        inner = max(inner, _depth_of_use(expr.right) + 1)
    return inner


def _depth_of_use(expr: Expr) -> int:
    """The depth of conditions that compute with the value of `expr` in 32 bits."""
    return _depth(expr) + may_overflow(expr)
