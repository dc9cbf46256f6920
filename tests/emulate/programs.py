"""Graphs of one task, whose body is in a file of its name or in cuda_functions.cuh,
and of rows that data selects."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from etc_dist.functions.push_rows import push_rows
from etc_dist.ir import (
    DeviceFunction,
    Expr,
    Graph,
    GraphFunction,
    device_function,
    graph_function,
    maximum,
)
from tests.graphs.calls import whole

FOLDER = Path(__file__).parent


def one_task(body: str, dtype: str, lane: str = "tensor") -> GraphFunction:
    """y [m] is what `body` makes of x [n]."""
    return whole(1, function=_function(body, lane), dtype=dtype, y="m")


@graph_function
def chosen_task(g: Graph, *, bodies: tuple[str, ...]) -> None:
    """The same, for the body of the number `chosen`: one library for all of them."""
    n, m, chosen = g.dims("n m chosen")
    x, y = g.input("x", (n,), "int32"), g.output("y", (m,), "int32")
    for number, body in enumerate(bodies):
        tasks = g.grid(i=maximum(0, 1 - maximum(number - chosen, chosen - number)))
        g.call(_function(body, "tensor"), tasks, reads=[x[:]], writes=[y[:]])


@graph_function
def gathered_rows(g: Graph, *, row: Callable[[Expr, Expr], Expr]) -> None:
    """y [n, 4] = rows of x [m, 4], of the numbers `row(at[i], m)`."""
    n, m = g.dims("n m")
    x, y = g.input("x", (m, 4), "float32"), g.output("y", (n, 4), "float32")
    at = g.input("at", (n,), "int32")
    (i,) = grid = g.grid(i=n)
    g.call(push_rows(), grid, reads=[x[row(at.load(i), m), :]], writes=[y[i, :]])


def _function(name: str, lane: str) -> DeviceFunction:
    def body(x: Any, y: Any) -> None:
        raise AssertionError("only the CUDA body runs here")

    body.__name__ = name
    own = FOLDER / f"{name}.cuh"
    source = own if own.exists() else FOLDER / "cuda_functions.cuh"
    return device_function(source=source, reads=1, writes=1, lane=lane)(body)
