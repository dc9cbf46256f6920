"""Index arithmetic that may exceed the 32 bits that it has on GPUs.

The verifier and the CPU backend compute with wider integers, so a program could be
correct there and wrong on a GPU. The check is interval arithmetic at the given dims."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from typing import Any

from etc_dist.errors import GraphError
from etc_dist.ir import RANK
from etc_dist.ir.call import TASK, Call
from etc_dist.ir.expr import Const, Expr, Load, Op, wrap
from etc_dist.ir.graph import GraphFunction
from etc_dist.ir.interval import Interval, combine, interval
from etc_dist.ir.loads import INT32
from etc_dist.verify.violations import Fault


def check_index_range(
    graph: GraphFunction, environments: Sequence[Mapping[str, Any]]
) -> list[Fault]:
    """A fault for each call with an index expression that may exceed 32 bits.
    `environments` has the dims and derived numbers of each rank."""
    symbols = (*graph.dims, *(graph.own_dims or ())[:1], *(s for s, _ in graph.derived))
    names = [symbol.name for symbol in symbols]
    intervals: dict[str, Interval] = {}
    for name in (*names, RANK.name):
        values = [env[name] for env in environments]
        intervals[name] = min(values), max(values)
    return [fault for call in graph.calls for fault in _check_call(call, intervals)]


def _check_call(call: Call, intervals: Mapping[str, Interval]) -> Iterator[Fault]:
    ranges = dict(intervals)
    tasks: float = 1
    for axis in call.axes:
        extent = max(interval(axis.extent, intervals)[1], 1)
        ranges[axis.symbol.name] = 0, extent - 1
        tasks *= extent
    ranges[TASK.name] = 0, tasks - 1
    bounds: dict[Expr, Interval] = {}
    for expr in dict.fromkeys(_expressions(call)):
        wide: list[Expr] = []
        _find_wide(expr, ranges, wide, bounds)
        if wide:
            low, high = interval(wide[0], ranges)
            yield Fault(
                GraphError,
                f"call {call.name}: {wide[0]} in {expr} may be {low} to {high}, and "
                "index arithmetic has 32 bits on GPUs",
                "use smaller numbers, name those of dims alone by g.let, or compute "
                "the index in an int32 tensor and load it",
            )
            return


def _expressions(call: Call) -> Iterator[Expr]:
    yield from (*(axis.extent for axis in call.axes), *call.order)
    if call.count is not None:
        yield call.count
    for region in (*call.reads, *call.writes):
        yield from (*region.tensor.shape, *region.parts, *region.ends)
    for ref in (*call.waits, *call.notifies):
        yield from (*ref.events.shape, *ref.parts, ref.expects)


def _find_wide(
    expr: Expr,
    ranges: Mapping[str, Interval],
    wide: list[Expr],
    intervals: dict[Expr, Interval],
) -> Interval:
    """The interval of `expr`. Adds to `wide` sub-expressions without loads that may not
    fit, innermost first, and sizes of tensors that are loaded from. Those with loads
    are checked at run time. `intervals` has those that were visited."""
    bounds = intervals.get(expr)
    if bounds is not None:
        return bounds
    if isinstance(expr, Op):
        left = _find_wide(expr.left, ranges, wide, intervals)
        right = _find_wide(expr.right, ranges, wide, intervals)
        bounds = combine(expr.name, left, right)
    else:
        for child in expr.children():
            _find_wide(child, ranges, wide, intervals)
        bounds = interval(expr, ranges)
    if isinstance(expr, Load):
        size = reduce(lambda a, b: a * b, expr.shape, wrap(1))
        if interval(size, ranges)[1] > INT32[1] + 1:
            wide.append(size)
    is_wide = bounds[0] < INT32[0] or bounds[1] > INT32[1]
    if is_wide and isinstance(expr, (Const, Op)) and not expr.is_loaded:
        wide.append(expr)
    intervals[expr] = bounds
    return bounds
