"""Loads of runtime tensors in index expressions."""

from __future__ import annotations

from collections.abc import Iterable

from etc_dist.errors import GraphError
from etc_dist.ir.event import EventRef
from etc_dist.ir.expr import Expr, Load

UPPER_BOUND = (
    "use an upper bound; a task without work writes a region of size 0, "
    "span(first.load(i), size.load(i)), and then only waits and notifies"
)


def loads_of(exprs: Iterable[Expr]) -> tuple[Load, ...]:
    """The loads in `exprs`, inner ones included, each once."""
    return tuple(dict.fromkeys(load for e in exprs for load in e.loads()))


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
