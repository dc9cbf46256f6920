"""Loads of runtime tensors in index expressions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from etc_dist.errors import GraphError
from etc_dist.ir.event import EventRef
from etc_dist.ir.expr import Const, Expr, Load, Op, Symbol
from etc_dist.ir.interval import Interval, combine

INT32: Interval = -(1 << 31), (1 << 31) - 1
"""The numbers that index arithmetic has on GPUs."""

UPPER_BOUND = (
    "use an upper bound; a task without work writes a region of size 0, "
    "span(first.load(i), size.load(i)), and then only waits and notifies"
)


def loads_of(exprs: Iterable[Expr]) -> tuple[Load, ...]:
    """The loads in `exprs`, inner ones included, each once."""
    return tuple(dict.fromkeys(load for e in exprs for load in e.loads()))


def may_overflow(expr: Expr) -> bool:
    """Whether `expr` is an operation on loaded numbers whose result may exceed 32 bits,
    although those of its operands do not. Runs check such results."""
    if not isinstance(expr, Op) or not expr.is_loaded:
        return False
    low, high = _result(expr)
    return low < INT32[0] or high > INT32[1]


def overflowing(expr: Expr) -> Iterator[Expr]:
    """The operations in `expr` that `may_overflow`, inner ones first."""
    for child in expr.children():
        yield from overflowing(child)
    if may_overflow(expr):
        yield expr


def _result(expr: Op) -> Interval:
    return combine(expr.name, _bounds(expr.left), _bounds(expr.right))


def _bounds(expr: Expr) -> Interval:
    """Bounds of a value that has 32 bits."""
    if isinstance(expr, Const):
        return expr.value, expr.value
    if isinstance(expr, Symbol) and expr.kind != "derived":
        return 0, INT32[1]
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
