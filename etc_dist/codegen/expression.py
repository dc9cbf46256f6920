"""Index expressions as CUDA text: dims come from the arguments `g`, coordinates from
the task's coordinate `c`, the task index is `t`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from etc_dist.ir.expr import Const, Expr, Load, Op, Symbol

_CALLS = {"//": "floordiv", "%": "floormod", "min": "minimum", "max": "maximum"}


def text(expr: Expr, replace: Mapping[str, Expr] | None = None) -> str:
    """`expr` as an i32 expression; `replace` puts expressions in the place of
    symbols."""
    if isinstance(expr, Const):
        return str(expr.value)
    if isinstance(expr, Symbol):
        if replace and expr.name in replace:
            return text(replace[expr.name])
        prefix = {"coordinate": "c.", "task": ""}.get(expr.kind, "g.")
        return prefix + expr.name
    if isinstance(expr, Load):
        place = text(_place(expr.index, expr.shape), replace)
        return f"load_index(g.{expr.tensor}, {place})"
    assert isinstance(expr, Op)
    left, right = text(expr.left, replace), text(expr.right, replace)
    if expr.name in _CALLS:
        return f"{_CALLS[expr.name]}({left}, {right})"
    return f"({left} {expr.name} {right})"


def linear(index: Sequence[Expr], shape: Sequence[Expr]) -> str:
    """The row-major position of an element."""
    return text(_place(index, shape))


def _place(index: Sequence[Expr], shape: Sequence[Expr]) -> Expr:
    at: Expr = Const(0)
    for i, extent in zip(index, shape, strict=True):
        at = at * extent + i
    return at
