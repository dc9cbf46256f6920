"""Index expressions as CUDA text: dims come from the arguments `g`, coordinates from
the task's coordinate `c`, the task index is `t`."""

from __future__ import annotations

from collections.abc import Sequence

from etc_dist.codegen.names import axis_name, dim_name, tensor_name
from etc_dist.ir.expr import Comparison, Const, Expr, Load, Op, Select, Symbol

_CALLS = {"//": "floordiv", "%": "floormod", "min": "minimum", "max": "maximum"}


def text(expr: Expr) -> str:
    """`expr` as an i32 expression."""
    if isinstance(expr, Const):
        return str(expr.value)
    if isinstance(expr, Symbol):
        return _symbol(expr)
    if isinstance(expr, Load):
        place = text(_place(expr.index, expr.shape))
        return f"load_index(g.{tensor_name(expr.tensor)}, {place})"
    if isinstance(expr, Select):
        chosen = f"{text(expr.then)} : {text(expr.other)}"
        return f"({condition_text(expr.condition)} ? {chosen})"
    assert isinstance(expr, Op)
    left, right = text(expr.left), text(expr.right)
    if expr.name in _CALLS:
        return f"{_CALLS[expr.name]}({left}, {right})"
    return f"({left} {expr.name} {right})"


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
