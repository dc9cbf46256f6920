"""Guards: conditions under which an expression is evaluated, and an element of an event
tensor is waited for or notified."""

from __future__ import annotations

from collections.abc import Iterable

from etc_dist.ir.expr import Comparison, Const, Expr, equal, select, wrap

Guard = tuple[Comparison, bool]
"""A comparison, and whether it must hold or must not."""


def guard_of(condition: Comparison | Expr | int, where: str) -> Guard:
    """The guard that is met where `condition` holds: a comparison, or a number that is
    not 0."""
    if isinstance(condition, Comparison):
        for side in (condition.left, condition.right):
            wrap(side, where)  # refuses a depth
        return condition, True
    number = int(condition) if isinstance(condition, bool) else condition
    return equal(wrap(number, where), 0), False


def is_met(guard: Guard) -> bool:
    """Whether `guard` is met for all tasks, since its numbers are constants."""
    comparison, holds = guard
    sides = comparison.left, comparison.right
    is_known = all(isinstance(side, Const) for side in sides)
    return is_known and bool(comparison.evaluate({})) == holds


def guard_text(guard: Guard) -> str:
    """The condition of `guard`, as it was written."""
    comparison, holds = guard
    return str(comparison if holds else comparison.left)


def under(guards: Iterable[Guard], expr: Expr, default: Expr) -> Expr:
    """`expr` where all `guards` are met, else `default`."""
    for condition, holds in reversed(tuple(guards)):
        then, otherwise = (expr, default) if holds else (default, expr)
        expr = select(condition, then, otherwise)
    return expr
