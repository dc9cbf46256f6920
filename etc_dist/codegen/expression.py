"""Index expressions as CUDA text: dims come from the arguments `g`, coordinates from
the task's coordinate `c`, the task index is `t`."""

from __future__ import annotations

from collections.abc import Sequence, Set

from etc_dist.codegen.names import axis_name, dim_name, tensor_name
from etc_dist.ir.expr import Comparison, Const, Expr, Load, Op, Select, Symbol

_CALLS = {"//": "floordiv", "%": "floormod", "min": "minimum", "max": "maximum"}
_NATURAL = {"//": "div_natural", "%": "mod_natural"}
"""For numbers that are not negative."""


def text(expr: Expr, naturals: Set[str] | None = None) -> str:
    """`expr` as an i32 expression. naturals: the numbers of `g.let` in it that are not
    negative where it is evaluated; None for unknown ones."""
    if isinstance(expr, Const):
        return str(expr.value)
    if isinstance(expr, Symbol):
        return _symbol(expr)
    if isinstance(expr, Load):
        place = text(_place(expr.index, expr.shape), naturals)
        return f"load_index(g.{tensor_name(expr.tensor)}, {place})"
    if isinstance(expr, Select):
        chosen = f"{text(expr.then, naturals)} : {text(expr.other, naturals)}"
        return f"({condition_text(expr.condition)} ? {chosen})"
    assert isinstance(expr, Op)
    left, right = text(expr.left, naturals), text(expr.right, naturals)
    if expr.name in _NATURAL and naturals is not None and _is_natural(expr, naturals):
        return f"{_NATURAL[expr.name]}({left}, {right})"
    if expr.name in _CALLS:
        return f"{_CALLS[expr.name]}({left}, {right})"
    return f"({left} {expr.name} {right})"


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


def condition_text(condition: Comparison) -> str:
    """`condition` as a bool expression."""
    left, right = text(condition.left), text(condition.right)
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
