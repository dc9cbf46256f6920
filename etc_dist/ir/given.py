"""What the language is given: refused there and then if it is of the wrong kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from etc_dist.errors import GraphError
from etc_dist.ir.event import EventRef
from etc_dist.ir.expr import Expr, Symbol, wrap
from etc_dist.ir.loads import BOUND, refuse_loads
from etc_dist.ir.tensor import Region

Member = TypeVar("Member", Region, EventRef)

MEMBERS = {
    Region: ("regions", "{0}=[x[tile(i, 64), :]], or {0}=[x[:, :]] for all of x"),
    EventRef: ("elements of event tensors", "{0}=[e[i]], or {0}=[e[i, j]]"),
}
"""What a call lists: in words, and how it is written."""


def require(
    fits: bool, given: object, what: str, *, where: str, wanted: str, fix: str
) -> None:
    """Raise GraphError, which shows what was `given`, unless it `fits`."""
    if not fits:
        raise GraphError(what, where=where, wanted=wanted, got=shown(given), fix=fix)


def shown(value: object) -> str:
    """`value` in one line: those of the language and functions by kind and name."""
    kind = "expression" if isinstance(value, Expr) else type(value).__name__
    if isinstance(value, (list, tuple)):
        inside = ", ".join(map(shown, value))
        one = "," if len(value) == 1 else ""
        return f"[{inside}]" if isinstance(value, list) else f"({inside}{one})"
    if type(value).__module__.startswith("etc_dist."):
        return f"{kind} {value}"
    return f"{kind} {value.__name__}" if hasattr(value, "__name__") else repr(value)


def require_function(body: object, decorator: str) -> None:
    """Raise GraphError unless `body` is what `decorator` may stand above."""
    require(
        callable(body) and hasattr(body, "__name__"),
        body,
        f"{decorator} does not stand above a function",
        where=decorator,
        wanted="a function with a name",
        fix=f"write {decorator} above a def",
    )


def listed(
    given: Sequence[Member], kind: type[Member], word: str, where: str
) -> tuple[Member, ...]:
    """The regions or elements that a call is given as `word`."""
    nouns, example = MEMBERS[kind]
    require(
        isinstance(given, (list, tuple)) and all(isinstance(m, kind) for m in given),
        given,
        f"{word}= is no list of {nouns}",
        where=where,
        wanted=f"a list, and nothing but {nouns} in it",
        fix=f"write {example.format(word)}",
    )
    return tuple(given)


def extents(given: Sequence[Expr | int], what: str, where: str) -> tuple[Expr, ...]:
    """The shape of `what`, a tensor or an event tensor."""
    require(
        isinstance(given, (list, tuple)),
        given,
        f"the shape of {what} is no tuple",
        where=where,
        wanted="a tuple of one extent for each axis",
        fix="write (n,) for one axis, (m, n) for two",
    )
    shape = tuple(wrap(part, f"{where}: the shape of {what}") for part in given)
    refuse_loads(f"the shape of {what}", where, shape, BOUND)
    return shape


def asked(
    function: Callable[..., Any], arguments: Sequence[Expr], where: str, example: str
) -> Any:
    """What `function`, given as in `example`, makes of `arguments`."""
    try:
        return function(*arguments)
    except TypeError as error:
        # NOTE: a fault inside of the function has a frame of its own; without one, the
        # function could not even be called.
        if error.__traceback__ and error.__traceback__.tb_next:
            raise
        raise GraphError(
            f"{example.partition('=')[0]}= cannot be called",
            where=where,
            wanted=f"a function of ({', '.join(map(str, arguments))})",
            got=str(error),
            fix=f"write {example}",
        ) from None


def expected_count(
    expects: Expr | int | Callable[..., Expr | int],
    axes: tuple[Symbol, ...],
    where: str,
) -> Expr:
    """`expects` as an expression of `axes`."""
    example = "expects=lambda i, ...: with one argument for each axis"
    count = asked(expects, axes, where, example) if callable(expects) else expects
    return wrap(count, f"{where}: expects=")


def coordinate(
    order: Callable[[Expr], Any], task: Symbol, axes: int, where: str
) -> tuple[Expr, ...]:
    """The coordinate that `order` gives to the task of index `task`."""
    example = "order=lambda t: (t,) for one axis, lambda t: (t // n, t % n) for two"
    parts = asked(order, (task,), where, example)
    require(
        isinstance(parts, (list, tuple)) and len(parts) == axes,
        parts,
        "order= returns no coordinate of the grid",
        where=where,
        wanted=f"{axes} in a tuple, one expression for each axis",
        fix=f"write {example}",
    )
    return tuple(wrap(part, f"{where}: order=") for part in parts)


def end_of_empty(until: Callable[[Expr], Any], task: Symbol, where: str) -> Expr:
    """Where the empty tasks end that begin with the task of index `task`."""
    end = asked(until, (task,), where, "empty_until=lambda t: end")
    return wrap(end, f"{where}: empty_until=")
