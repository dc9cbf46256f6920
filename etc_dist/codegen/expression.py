"""Index expressions as CUDA text: dims come from the arguments `g`, coordinates from
the task's coordinate `c`, the task index is `t`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set

from etc_dist.codegen.names import axis_name, dim_name, tensor_name
from etc_dist.ir.call import Call
from etc_dist.ir.expr import Comparison, Const, Expr, Load, Op, Select, Symbol

_CALLS = {"//": "floordiv", "%": "floormod", "min": "minimum", "max": "maximum"}
_NATURAL = {"//": "div_natural", "%": "mod_natural"}
"""For numbers that are not negative."""


def text(
    expr: Expr,
    naturals: Set[str] | None = None,
    divisors: Mapping[Expr, str] | None = None,
) -> str:
    """`expr` as an i32 expression. naturals: the numbers of `g.let` in it that are not
    negative where it is evaluated; None for unknown ones. divisors: the C++ text of
    those that the host prepares."""
    if isinstance(expr, Const):
        return str(expr.value)
    if isinstance(expr, Symbol):
        return _symbol(expr)
    if isinstance(expr, Load):
        place = text(_place(expr.index, expr.shape), naturals, divisors)
        return f"load_index(g.{tensor_name(expr.tensor)}, {place})"
    if isinstance(expr, Select):
        sides = (text(side, naturals, divisors) for side in (expr.then, expr.other))
        chosen = " : ".join(sides)
        condition = condition_text(expr.condition, naturals, divisors)
        return f"({condition} ? {chosen})"
    assert isinstance(expr, Op)
    left = text(expr.left, naturals, divisors)
    right = text(expr.right, naturals, divisors)
    if _divides_naturals(expr, naturals):
        if divisors and expr.right in divisors:
            by = divisors[expr.right]
            if expr.name == "//":
                return f"div_by({left}, {by})"
            return f"mod_by({left}, {right}, {by})"
        return f"{_NATURAL[expr.name]}({left}, {right})"
    if expr.name in _CALLS:
        return f"{_CALLS[expr.name]}({left}, {right})"
    return f"({left} {expr.name} {right})"


def fixed_divisors(call: Call) -> Iterator[Expr]:
    """The divisors in the order of `call` that depend on dims alone."""
    naturals = extent_names(call)
    stack: list[Expr] = [*call.order]
    while stack:
        node = stack.pop()
        stack.extend(reversed(node.children()))
        if not isinstance(node, Op) or not _divides_naturals(node, naturals):
            continue
        kinds = {symbol.kind for symbol in node.right.symbols()}
        if kinds and kinds <= {"dim", "derived"} and not node.right.is_loaded:
            yield node.right


def extent_names(call: Call) -> set[str]:
    """The numbers of `g.let` that are extents of the grid of `call`: positive wherever
    it has a task."""
    return {a.extent.name for a in call.axes if isinstance(a.extent, Symbol)}


def _divides_naturals(expr: Op, naturals: Set[str] | None) -> bool:
    if expr.name not in _NATURAL or naturals is None:
        return False
    return _is_natural(expr, naturals)


def _is_natural(expr: Expr, naturals: Set[str]) -> bool:
    """Whether `expr` is not negative: dims, coordinates, ranks and task indices are
    not."""
    if isinstance(expr, Const):
        return expr.value >= 0
    if isinstance(expr, Symbol):
        return expr.kind != "derived" or expr.name in naturals
    if not isinstance(expr, Op) or expr.name == "-":
        return False
    both = (_is_natural(side, naturals) for side in (expr.left, expr.right))
    return any(both) if expr.name == "max" else all(both)


def condition_text(
    condition: Comparison,
    naturals: Set[str] | None = None,
    divisors: Mapping[Expr, str] | None = None,
) -> str:
    """`condition` as a bool expression; for the rest see `text`."""
    left = text(condition.left, naturals, divisors)
    right = text(condition.right, naturals, divisors)
    return f"({left} {condition.name} {right})"


def _symbol(symbol: Symbol) -> str:
    if symbol.kind == "coordinate":
        return f"c.{axis_name(symbol.name)}"
    if symbol.kind in ("dim", "derived"):
        return f"g.{dim_name(symbol.name)}"
    return "g.rank" if symbol.kind == "rank" else symbol.name


def wide(expr: Op) -> str:
    """`expr` as an i64 expression that is exact if its operands have 32 bits."""
    left, right = f"i64({text(expr.left)})", f"i64({text(expr.right)})"
    if expr.name == "//":
        return f"floordiv({left}, {right})"
    if expr.name in _CALLS:  # its result has 32 bits, too
        return f"i64({text(expr)})"
    return f"({left} {expr.name} {right})"


def linear(index: Sequence[Expr], shape: Sequence[Expr]) -> str:
    """The row-major position of an element."""
    return text(_place(index, shape))


def _place(index: Sequence[Expr], shape: Sequence[Expr]) -> Expr:
    at: Expr = Const(0)
    for i, extent in zip(index, shape, strict=True):
        at = at * extent + i
    return at
