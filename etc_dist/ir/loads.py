"""Loads of runtime tensors in index expressions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

from etc_dist.errors import GraphError
from etc_dist.ir.event import EventRef
from etc_dist.ir.expr import Const, Expr, Load, Op, Select, Symbol
from etc_dist.ir.guard import Guard
from etc_dist.ir.interval import Interval, combine, hull

INT32: Interval = -(1 << 31), (1 << 31) - 1
"""The numbers that index arithmetic has on GPUs."""

UPPER_BOUND = (
    "use an upper bound, in a grid of the tensor lane up_to(bound, count.load(i)); a "
    "task without work writes a region of size 0, span(first.load(i), size.load(i)), "
    "and then only waits and notifies"
)


def loads_of(exprs: Iterable[Expr]) -> tuple[Load, ...]:
    """The loads in `exprs`, inner ones included, each once."""
    return tuple(dict.fromkeys(load for e in exprs for load in e.loads))


def guarded_loads(exprs: Iterable[Expr]) -> Iterator[tuple[Load, tuple[Guard, ...]]]:
    """The loads in `exprs`, inner ones included, each with the guards under which it
    is evaluated."""
    for expr in exprs:
        yield from _guarded(expr, ())


def _guarded(
    expr: Expr, guards: tuple[Guard, ...]
) -> Iterator[tuple[Load, tuple[Guard, ...]]]:
    if isinstance(expr, Load):
        yield expr, guards
    if isinstance(expr, Select):
        for part in (expr.condition.left, expr.condition.right):
            yield from _guarded(part, guards)
        yield from _guarded(expr.then, (*guards, (expr.condition, True)))
        yield from _guarded(expr.other, (*guards, (expr.condition, False)))
        return
    for child in expr.children():
        yield from _guarded(child, guards)


@lru_cache(1 << 14)  # simulations evaluate the same expressions for each task
def may_overflow(expr: Expr) -> bool:
    """Whether `expr` is an operation on loaded numbers whose result may exceed 32 bits,
    although those of its operands do not. Runs check such results."""
    if not isinstance(expr, Op) or not expr.is_loaded:
        return False
    low, high = _result(expr)
    return low < INT32[0] or high > INT32[1]


def _may_some_overflow(expr: Expr) -> bool:
    # Kept with the expression: a cache would compare it with equal ones, part by part.
    attributes: dict[str, bool] = vars(expr)
    if "may_some_overflow" not in attributes:
        parts = map(_may_some_overflow, expr.children())
        attributes["may_some_overflow"] = may_overflow(expr) or any(parts)
    return attributes["may_some_overflow"]


def overflowing(expr: Expr, env: Mapping[str, Any]) -> Iterator[Expr]:
    """The operations in `expr` that `may_overflow`, inner ones first, without those
    that `select` does not choose under `env`."""
    if not _may_some_overflow(expr):
        return
    if isinstance(expr, Select):
        for part in (expr.condition.left, expr.condition.right):
            yield from overflowing(part, env)
        yield from overflowing(expr.chosen(env), env)
        return
    for child in expr.children():
        yield from overflowing(child, env)
    if isinstance(expr, Op) and may_overflow(expr):
        yield expr


def _result(expr: Op) -> Interval:
    return combine(expr.name, _bounds(expr.left), _bounds(expr.right))


def _bounds(expr: Expr) -> Interval:
    """Bounds of a value that has 32 bits."""
    if isinstance(expr, Const):
        return expr.value, expr.value
    if isinstance(expr, Symbol) and expr.kind != "derived":
        return 0, INT32[1]
    if isinstance(expr, Select):
        return hull(_bounds(expr.then), _bounds(expr.other))
    low, high = _result(expr) if isinstance(expr, Op) else INT32
    return max(low, INT32[0]), min(high, INT32[1])


def notifier_counts(ref: EventRef) -> tuple[Expr, ...]:
    """The expected count of `ref`, if its notifier evaluates it: in a dynamic schedule,
    to check whether its notification was the last. Only the waiting rank evaluates the
    count of a cross-rank element."""
    return () if ref.events.cross_rank else (ref.expects,)


def refuse_loads(what: str, where: str, exprs: Iterable[Expr], fix: str) -> None:
    """Raise GraphError if `exprs`, needed before a program runs, hold loads."""
    loads = loads_of(exprs)
    if loads:
        raise GraphError(
            f"{what} depends on a runtime tensor",
            where=where,
            wanted="a number that follows from the dims",
            got=", ".join(map(str, loads)),
            fix=fix,
        )
