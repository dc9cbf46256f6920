"""What is known of an index expression for all dims: bounds, and a common divisor."""

from __future__ import annotations

from math import gcd, inf

from etc_dist.ir.expr import Const, Expr, Op, Symbol

UNKNOWN = -inf, inf


def bounds(expr: Expr) -> tuple[float, float]:
    """The least and the greatest value that `expr` can have; infinite if unknown."""
    if isinstance(expr, Const):
        return expr.value, expr.value
    if isinstance(expr, Symbol):
        return 0, inf  # dims, coordinates, ranks and task indices
    if not isinstance(expr, Op):
        return UNKNOWN
    (low, high), (other_low, other_high) = bounds(expr.left), bounds(expr.right)
    if expr.name == "+":
        return low + other_low, high + other_high
    if expr.name == "-":
        return low - other_high, high - other_low
    if expr.name == "min":
        return min(low, other_low), min(high, other_high)
    if expr.name == "max":
        return max(low, other_low), max(high, other_high)
    if min(low, other_low) < 0:
        return UNKNOWN
    if expr.name == "*":
        # NOTE: 0 times infinity is NaN.
        product = 0 if 0 in (high, other_high) else high * other_high
        return low * other_low, product
    if expr.name == "//":
        least = 0 if other_high == inf else low // max(other_high, 1)
        return least, high if high == inf else high // max(other_low, 1)
    return 0, max(other_high - 1, 0)


def divisor(expr: Expr) -> int:
    """A number that divides `expr`, the largest that is known; 0 for 0."""
    if isinstance(expr, Const):
        return abs(expr.value)
    if not isinstance(expr, Op) or expr.name == "//":
        return 1
    left, right = divisor(expr.left), divisor(expr.right)
    return left * right if expr.name == "*" else gcd(left, right)


def is_multiple(expr: Expr, of: int) -> bool:
    """Whether `expr` is a multiple of `of` for all dims; of 0: whether it is 0."""
    known = divisor(expr)
    return known == 0 if of == 0 else known % of == 0


def alternatives(expr: Expr) -> list[Expr]:
    """The expressions of which `expr` is the least."""
    if isinstance(expr, Op) and expr.name == "min":
        return [*alternatives(expr.left), *alternatives(expr.right)]
    return [expr]
