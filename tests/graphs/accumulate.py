"""A graph that updates a state in place; both backends can run it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from etc_dist.functions.push_rows import push_rows
from etc_dist.ir import Graph, device_function, graph_function

Array = np.ndarray[Any, Any]
WIDTH = 8
SOURCE = Path(__file__).with_suffix(".cuh")


@device_function(source=SOURCE, reads=1, writes=1)
def add_to_row(x: Array, total: Array) -> None:
    total[...] += x


@graph_function
def accumulate(g: Graph, *, waits: bool = True) -> None:
    """y[i] is row place[i] of total, and then x[i] is added to that row. Without
    `waits` no event orders the two calls."""
    n, rows = g.dims("n rows")
    x, y = (make(name, (n, WIDTH), "float32")
            for make, name in ((g.input, "x"), (g.output, "y")))  # fmt: skip
    total = g.state("total", (rows, WIDTH), "float32")
    place = g.state("place", (n,), "int32")
    read = g.events("read", (n,), expects=1)
    (i,) = grid = g.grid(i=n)
    row = place.load(i)
    g.call(
        push_rows(),
        grid,
        reads=[total[row, :]],
        writes=[y[i, :]],
        notifies=[read[i]] if waits else [],
    )
    g.call(
        add_to_row,
        grid,
        reads=[x[i, :]],
        writes=[total[row, :]],
        waits=[read[i]] if waits else [],
    )


def arrays(seed: int = 0) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    return {
        "x": rng.integers(-9, 9, (4, WIDTH)).astype(np.float32),
        "total": rng.integers(-9, 9, (6, WIDTH)).astype(np.float32),
        "place": rng.permutation(6)[:4].astype(np.int32),
    }


def expected(operands: dict[str, Array], runs: int = 1) -> dict[str, Array]:
    """y of the last run, and total after it."""
    total = operands["total"].copy()
    for _ in range(runs):
        y = total[operands["place"]]
        total[operands["place"]] += operands["x"]
    return {"y": y, "total": total}
