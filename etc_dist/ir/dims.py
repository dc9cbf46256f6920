"""Values of a graph's dims."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from etc_dist.errors import ArgumentError
from etc_dist.ir.expr import Expr, Symbol
from etc_dist.ir.graph import GraphFunction
from etc_dist.ir.tensor import Tensor


def checked_dims(graph: GraphFunction, dims: Any) -> dict[str, int]:
    """`dims` as ints, in the graph's order. ArgumentError unless there is one integer
    of at least 0 for each dim of the graph, and no other."""
    wanted = [symbol.name for symbol in graph.dims]
    given = dims if isinstance(dims, Mapping) else {}
    good = all(isinstance(n, (int, np.integer)) and n >= 0 for n in given.values())
    if given is not dims or given.keys() != set(wanted) or not good:
        named = ", ".join(f"{name}={value!r}" for name, value in given.items())
        raise ArgumentError(
            f"the dims do not fit graph {graph.name}",
            where=f"graph {graph.name}",
            wanted=f"integers of at least 0 for {', '.join(wanted) or 'no dims'}",
            got=(named or "none") if given is dims else repr(dims),
            fix="give every dim of the graph and no other",
        )
    whole = {name: int(given[name]) for name in wanted}
    refuse_negative_extents(graph, whole)
    return whole


def refuse_negative_extents(graph: GraphFunction, dims: Mapping[str, int]) -> None:
    """ArgumentError if a tensor or an event tensor has no size at these dims."""
    shapes = {t.name: t.shape for t in graph.tensors}
    shapes |= {e.name: e.shape for e in graph.events}
    arguments = graph.arguments()  # only these may depend on the rank
    ranked = [t.name for t in arguments if any(s.name not in dims for s in _symbols(t))]
    try:
        found = _lengths(shapes, graph.environment(dims, 0))
        for rank in range(1, graph.world_size) if ranked else ():
            env = graph.environment(dims, rank)
            found |= _lengths({f"{k} of rank {rank}": shapes[k] for k in ranked}, env)
    except ArithmeticError:  # the proof names the expression
        return
    negative = [f"{k} {n}" for k, n in found.items() if min(n, default=0) < 0]
    if negative:
        named = ", ".join(f"{name}={value}" for name, value in dims.items())
        raise ArgumentError(
            f"the dims do not fit graph {graph.name}",
            where=f"graph {graph.name}, {named}",
            wanted="tensors and event tensors with axes of length 0 or more",
            got=", ".join(negative),
            fix="call it with larger arrays",
        )


def _symbols(tensor: Tensor) -> Iterator[Symbol]:
    return (symbol for extent in tensor.shape for symbol in extent.symbols())


def _lengths(
    shapes: Mapping[str, Sequence[Expr]], env: Mapping[str, Any]
) -> dict[str, list[int]]:
    return {name: [int(n.evaluate(env)) for n in shapes[name]] for name in shapes}
