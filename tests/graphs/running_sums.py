"""A graph with conditional waits and notifications: running sums in segments.

Both backends can run it; the widths suit them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from etc_dist.functions.push_rows import push_rows
from etc_dist.ir import (
    Expr,
    Graph,
    device_function,
    graph_function,
    maximum,
    minimum,
    select,
    span,
)

Array = np.ndarray[Any, Any]
WIDTH, SEGMENT = 4, 3
SOURCE = Path(__file__).with_suffix(".cuh")
KINDS = ("dims", "input", "local")
"""What tells whether a row joins the one before."""


@device_function(source=SOURCE, reads=2, writes=1)
def add_before(x: Array, before: Array, y: Array) -> None:
    y[...] = x + before.sum(axis=0)


@graph_function
def running_sums(
    g: Graph, *, kind: str, waits_when: bool = True, notifies_when: bool = True
) -> None:
    """y[i] = x[i], and y[i - 1] where row i joins it. The options omit conditions that
    are needed."""
    n = g.dims("n")
    x = g.input("x", (n, WIDTH), "float32")
    joins = g.input("joins", (n,), "int32")
    y = g.output("y", (n, WIDTH), "float32")
    summed = g.events("summed", (n,), expects=1)
    copied = g.events("copied", (1,), expects=1)
    copy_of_x = g.local("own", (n,), "int32")
    if kind == "local":
        writes, notifies = [copy_of_x[:]], [copied[0].when(n > 0)]
        whole = g.grid(one=1)
        g.call(push_rows(), whole, reads=[joins[:]], writes=writes, notifies=notifies)

    def joined(row: Expr) -> Expr:
        if kind == "dims":
            return row % SEGMENT
        return (joins if kind == "input" else copy_of_x).load(row)

    (i,) = grid = g.grid(i=n)
    before, after = summed[i - 1], summed[i]
    g.call(
        add_before,
        grid,
        reads=[x[i, :], y[span(maximum(i - 1, 0), minimum(joined(i), 1)), :]],
        writes=[y[i, :]],
        waits=[
            *([copied[0]] if kind == "local" else []),
            before.when(joined(i)) if waits_when else before.when(i > 0),
        ],
        notifies=[
            after.when(i + 1 < n).when(joined(i + 1)) if notifies_when else after
        ],
    )


@graph_function
def sums_over_ranks(g: Graph) -> None:
    """y [n] on each rank: the running sums of the rows of all ranks, rank by rank. One
    text for any number of ranks."""
    n, last = g.dims("n"), g.world_size - 1
    x, y = (
        f(name, (n, WIDTH), "float32") for f, name in ((g.input, "x"), (g.output, "y"))
    )
    carry = g.symmetric("carry", (1, WIDTH), "float32")
    came = g.events("came", (1,), expects=1, cross_rank=True)
    summed = g.events("summed", (n,), expects=1)
    single, before = g.grid(one=1), carry[span(0, minimum(g.rank, 1)), :]
    g.call(
        add_before,
        single,
        name="first",
        reads=[x[0, :], before],
        writes=[y[0, :]],
        waits=[came[0].when(g.rank > 0)],
        notifies=[summed[0]],
    )
    (i,) = grid = g.grid(i=n - 1)
    g.call(
        add_before,
        grid,
        reads=[x[i + 1, :], y[span(i, 1), :]],
        writes=[y[i + 1, :]],
        waits=[summed[i]],
        notifies=[summed[i + 1]],
    )
    is_sent = select(g.rank < last, 1, 0)
    to = carry.on(minimum(g.rank + 1, last))
    g.call(
        push_rows(),
        single,
        reads=[y[span(n - 1, is_sent), :]],
        writes=[to[span(0, is_sent), :]],
        waits=[summed[n - 1]],
        notifies=[came.on(g.rank + 1)[0].when(g.rank < last)],
    )


def inputs(n: int, seed: int = 0) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    x = rng.integers(-9, 10, (n, WIDTH)).astype(np.float32)
    joins = rng.integers(0, 2, n).astype(np.int32)
    joins[:1] = 0
    return {"x": x, "joins": joins}


def reference(arrays: dict[str, Array], kind: str) -> Array:
    joins = arrays["joins"]
    if kind == "dims":
        joins = np.arange(len(joins)) % SEGMENT
    y = arrays["x"].copy()
    for row in np.flatnonzero(joins):
        y[row] += y[row - 1]
    return y
