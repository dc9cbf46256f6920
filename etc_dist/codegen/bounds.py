"""Range checks of loaded values, and of 32-bit arithmetic on them, as CUDA expressions
that must all be true.

NOTE: each `load` in the text is one. So a value is compared once, as an unsigned
number: a negative one is too large."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeGuard

from etc_dist.codegen.expression import PLAIN, Writer
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
    those of smaller depth. Empty without any."""
    stages: dict[int, list[str]] = {}
    for condition in conditions:
        stages.setdefault(condition.depth, []).append(condition.text)
    return " && ".join(" & ".join(stages[depth]) for depth in sorted(stages))


def waits_in_range(call: Call, writer: Writer = PLAIN) -> Iterable[Condition]:
    """The range checks of the loaded waits."""
    checks = _Checks(writer)
    return dict.fromkeys(c for ref in call.loaded_waits for c in checks.wait(ref))


def in_range(
    call: Call, world: int, has_far: bool = False, writer: Writer = PLAIN
) -> Iterable[Condition]:
    """The range checks of loaded accesses and notifications. has_far: on other hosts
    there are at most the partners of far functions."""
    checks, regions = _Checks(writer), (*call.reads, *call.writes)
    accessed = (c for region in regions for c in checks.region(region, world))
    notification_checks = (
        c for ref in call.notifies for c in checks.notified(ref, world)
    )
    ranks = [region.rank for region in regions] + [*map(_rank_of, call.notifies)]
    far = call.function.far
    rank_checks = (c for r in ranks if has_far for c in checks.reached(r, far))
    return dict.fromkeys([*accessed, *notification_checks, *rank_checks])


@dataclass(frozen=True)
class _Checks:
    """The conditions of the parts of a task, as `writer` writes them."""

    writer: Writer

    def wait(self, ref: EventRef) -> Iterator[Condition]:
        yield from self.element(ref)
        yield from self.loads(ref.expects)

    def notified(self, ref: EventRef, world: int) -> Iterator[Condition]:
        yield from self.element(ref)
        yield from self.rank(_rank_of(ref), world)
        for count in notifier_counts(ref):
            yield from self.loads(count)

    def element(self, ref: EventRef) -> Iterator[Condition]:
        if not ref.is_loaded:
            return
        yield from self.loads(ref.holds)
        for part, extent in zip(ref.index, ref.events.shape, strict=True):
            conditions = [
                *self.loads(part, is_compared=True),
                *self.below(part, extent),
            ]
            for guard in reversed(ref.guards):
                conditions = [*self.where(guard, conditions)]
            yield from conditions

    def region(self, region: Region, world: int) -> Iterator[Condition]:
        """NOTE: a start without loads may lie beyond the edge: then the region is
        empty. The verifier proves that it is not negative."""
        shape = region.tensor.shape
        parts = zip(region.start, region.size, shape, region.kept_axes, strict=True)
        for start, size, extent, is_kept in parts:
            yield from self.loads(start, is_compared=True)
            yield from self.loads(size)
            if start.is_loaded:
                check = "is_at_most" if is_kept else "is_below"
                yield from self.below(start, extent, check)
        yield from self.rank(region.rank, world)

    def rank(self, rank: Expr | None, world: int) -> Iterator[Condition]:
        if rank is not None and rank.is_loaded:
            yield from self.loads(rank, is_compared=True)
            yield from self.below(rank, Const(world))

    def reached(self, rank: Expr | None, far: bool) -> Iterator[Condition]:
        if rank is not None and rank.is_loaded:
            peer = self.writer.text(rank)
            check = f"reaches({peer}, g.rank)" if far else f"has({peer})"
            yield Condition(f"g.peer.{check}", _depth_of_use(rank))

    def loads(self, expr: Expr, is_compared: bool = False) -> Iterator[Condition]:
        """The range checks of each load in `expr`, inner ones first; loaded divisors
        must not be zero, and intermediate results must have 32 bits. `is_compared`:
        another condition compares the value of `expr`."""
        if isinstance(expr, Select):
            yield from self.selected(expr)
            return
        for child in expr.children():
            yield from self.loads(child, isinstance(expr, Load))
        if isinstance(expr, Load):
            for index, extent in zip(expr.index, expr.shape, strict=True):
                yield from self.below(index, extent)
        if _has_loaded_divisor(expr):
            divisor = self.writer.text(expr.right)
            yield Condition(f"({divisor} != 0)", _depth_of_use(expr.right))
        if isinstance(expr, Op) and may_overflow(expr) and not is_compared:
            yield Condition(f"fits_i32({self.writer.wide(expr)})", _depth(expr))

    def selected(self, expr: Select) -> Iterator[Condition]:
        """The conditions of a selection: those of a choice hold where it is chosen."""
        operands = (expr.condition.left, expr.condition.right)
        for operand in operands:
            yield from self.loads(operand)
        for choice, holds in ((expr.then, True), (expr.other, False)):
            yield from self.where((expr.condition, holds), self.loads(choice))

    def where(
        self, guard: Guard, conditions: Iterable[Condition]
    ) -> Iterator[Condition]:
        """`conditions` for tasks for which `guard` is met."""
        comparison, holds = guard
        depth = max(map(_depth_of_use, (comparison.left, comparison.right)))
        condition = self.writer.condition(comparison)
        excuse = f"!({condition})" if holds else condition
        for inner in conditions:
            yield Condition(f"({excuse} || {inner.text})", max(inner.depth, depth))

    def below(
        self, value: Expr, extent: Expr, check: str = "is_below"
    ) -> Iterator[Condition]:
        if isinstance(value, Const) and isinstance(extent, Const):
            return  # the proof covers constants
        if isinstance(value, Op) and value.is_loaded:
            number = self.writer.wide(value)
        else:
            number = self.writer.text(value)
        text = f"{check}({number}, {self.writer.text(extent)})"
        yield Condition(text, _depth(value))


def _rank_of(ref: EventRef) -> Expr | None:
    """The rank of a notification, this one if there is none."""
    return None if ref.rank is None else ref.guarded(ref.rank, RANK)


def _has_loaded_divisor(expr: Expr) -> TypeGuard[Op]:
    return isinstance(expr, Op) and expr.name in ("//", "%") and expr.right.is_loaded


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
