"""Interval arithmetic of index expressions."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

from etc_dist.ir.expr import Const, Expr, Op, Select, Symbol

Interval = tuple[float, float]
UNKNOWN: Interval = -inf, inf


def interval(expr: Expr, ranges: Mapping[str, Interval]) -> Interval:
    """Bounds of the values of `expr`. `ranges` has those of symbols; dims, coordinates,
    ranks and task indices are at least 0. Loads are unbounded."""
    if isinstance(expr, Const):
        return expr.value, expr.value
    if isinstance(expr, Symbol):
        return ranges.get(expr.name, (0, inf))
    if isinstance(expr, Select):
        return hull(interval(expr.then, ranges), interval(expr.other, ranges))
    if not isinstance(expr, Op):
        return UNKNOWN
    return combine(expr.name, interval(expr.left, ranges), interval(expr.right, ranges))


def hull(left: Interval, right: Interval) -> Interval:
    """Bounds of values that are within `left` or within `right`."""
    return min(left[0], right[0]), max(left[1], right[1])


def combine(name: str, left: Interval, right: Interval) -> Interval:
    """Bounds of the operation `name` of values within `left` and `right`."""
    (a, b), (c, d) = left, right
    if name == "+":
        return a + c, b + d
    if name == "-":
        return a - d, b - c
    if name == "min":
        return min(a, c), min(b, d)
    if name == "max":
        return max(a, c), max(b, d)
    if name == "*":
        # NOTE: 0 times infinity is NaN.
        products = [x * y if x and y else 0 for x in (a, b) for y in (c, d)]
        return min(products), max(products)
    if c < 0:  # the divisor may be negative
        is_remainder = name == "%"
        return (c + 1, max(d - 1, 0)) if is_remainder else (min(a, -b), max(b, -a))
    c, d = max(c, 1), max(d, 1)  # a divisor of 0 is refused elsewhere
    if name == "%":
        return (a, b) if a >= 0 and b < c else (0, d - 1)
    quotients = [_divide(x, y) for x in (a, b) for y in (c, d)]
    return min(quotients), max(quotients)


def _divide(value: float, divisor: float) -> float:
    """value // divisor, for a divisor of at least 1; both may be infinite."""
    if value in (-inf, inf):
        return value
    if divisor == inf:
        return 0 if value >= 0 else -1
    return value // divisor
