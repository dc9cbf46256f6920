"""Values of a graph's dims."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from etc_dist.errors import ArgumentError, expect_range
from etc_dist.ir.expr import Expr, Symbol
from etc_dist.ir.graph import GraphFunction
from etc_dist.ir.tensor import Tensor


def checked_dims(graph: GraphFunction, dims: Mapping[str, Any]) -> dict[str, int]:
    """`dims` as ints, in the graph's order. ArgumentError unless there is one integer
    of at least 0 for each dim of the graph, and no other."""
    whole = named_dims(graph, dims)
    if missing := [symbol.name for symbol in graph.dims if symbol.name not in dims]:
        raise _unfit(graph, f"none for {', '.join(missing)}", "give every dim")
    refuse_unfit(graph, whole)
    return whole


def named_dims(graph: GraphFunction, dims: Mapping[str, Any]) -> dict[str, int]:
    """Some dims as ints, in the graph's order. ArgumentError for other names, and for
    numbers below 0; TypeError for others than integers."""
    names = [symbol.name for symbol in graph.dims]
    if bad_names := [name for name in dims if name not in names]:
        raise _unfit(graph, ", ".join(map(str, bad_names)), "correct the name")
    return {n: expect_range(dims[n], 0, None, n) for n in names if n in dims}


def _unfit(graph: GraphFunction, got: str, fix: str) -> ArgumentError:
    names = ", ".join(symbol.name for symbol in graph.dims)
    return ArgumentError(
        f"the dims do not fit graph {graph.name}",
        where=f"graph {graph.name}",
        wanted=f"integers of at least 0 for {names or 'no dims'}",
        got=got,
        fix=fix,
    )


def refuse_unfit(graph: GraphFunction, dims: Mapping[str, int]) -> None:
    """ArgumentError if a tensor or an event tensor has no size at these dims, or if
    these do not meet a requirement of the graph."""
    shapes = {t.name: t.shape for t in graph.tensors}
    shapes |= {e.name: e.shape for e in graph.events}
    arguments = graph.arguments()  # only these may depend on the rank
    ranked = [t.name for t in arguments if any(s.name not in dims for s in _symbols(t))]
    try:
        for requirement in graph.requirements:
            requirement.check(dims, _place(graph, dims), ArgumentError)
        lengths = _lengths(shapes, graph.environment(dims, 0))
        for rank in range(1, graph.world_size) if ranked else ():
            env = graph.environment(dims, rank)
            lengths |= _lengths({f"{k} of rank {rank}": shapes[k] for k in ranked}, env)
    except ArithmeticError:
        refuse_undefined(graph, dims)
        raise
    negative = [f"{k} {n}" for k, n in lengths.items() if min(n, default=0) < 0]
    if negative:
        raise ArgumentError(
            f"the dims do not fit graph {graph.name}",
            where=_place(graph, dims),
            wanted="tensors and event tensors with axes of length 0 or more",
            got=", ".join(negative),
            fix="call it with larger arrays",
        )


def refuse_undefined(graph: GraphFunction, dims: Mapping[str, int]) -> None:
    """ArgumentError if a number of `g.let` or `g.require`, a shape or an extent of a
    grid or a loop divides by zero at these dims."""
    for rank in range(graph.world_size):
        env = graph.of_rank(dims, rank)
        for what, expr, symbol in _sizes(graph):
            try:
                value = int(expr.evaluate(env))
            except ArithmeticError as error:
                raise ArgumentError(
                    f"{what} cannot be computed at these dims",
                    where=_place(graph, dims),
                    wanted="divisors other than 0",
                    got=f"{expr}: {error}",
                    fix="choose other dims, or divide by maximum(..., 1)",
                ) from error
            if symbol is not None:
                env[symbol.name] = value


def _sizes(graph: GraphFunction) -> Iterator[tuple[str, Expr, Symbol | None]]:
    """The numbers that depend on dims and ranks alone; of `g.let` with their symbol."""
    for symbol, value in graph.derived:
        yield f"the number {symbol} of g.let", value, symbol
    for requirement in graph.requirements:
        for number in requirement.exprs:
            yield "a number of g.require", number, None
    shapes = [(tensor.name, tensor.shape) for tensor in graph.tensors]
    shapes += [(events.name, events.shape) for events in graph.events]
    for name, shape in shapes:
        yield from ((f"the shape of {name}", extent, None) for extent in shape)
    for call in graph.calls:
        for axis in call.axes:
            yield f"the extent {axis.symbol} of call {call.name}", axis.extent, None


def _place(graph: GraphFunction, dims: Mapping[str, int]) -> str:
    values = ", ".join(f"{name}={value}" for name, value in dims.items())
    return f"graph {graph.name}, {values}"


def _symbols(tensor: Tensor) -> Iterator[Symbol]:
    return (symbol for extent in tensor.shape for symbol in extent.symbols)


def _lengths(
    shapes: Mapping[str, Sequence[Expr]], env: Mapping[str, Any]
) -> dict[str, list[int]]:
    return {name: [int(n.evaluate(env)) for n in shapes[name]] for name in shapes}
