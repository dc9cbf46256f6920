"""Divisors and alternatives of index expressions, for all dims."""

from __future__ import annotations

from math import gcd

from etc_dist.ir.expr import Const, Expr, Op, Select


def divisor(expr: Expr) -> int:
    """The largest known divisor of `expr`; 0 for 0."""
    if isinstance(expr, Const):
        return abs(expr.value)
    if isinstance(expr, Select):
        return gcd(divisor(expr.then), divisor(expr.other))
    if not isinstance(expr, Op) or expr.name == "//":
        return 1
    left, right = divisor(expr.left), divisor(expr.right)
    return left * right if expr.name == "*" else gcd(left, right)


def is_multiple(expr: Expr, of: int) -> bool:
    """Whether `expr` is a multiple of `of` for all dims; of 0: whether it is 0."""
    factor = divisor(expr)
    return factor == 0 if of == 0 else factor % of == 0


def alternatives(expr: Expr) -> list[Expr]:
    """Expressions, one of which has the value of `expr`."""
    if isinstance(expr, Op) and expr.name == "min":
        return [*alternatives(expr.left), *alternatives(expr.right)]
    if isinstance(expr, Select):
        return [*alternatives(expr.then), *alternatives(expr.other)]
    return [expr]
