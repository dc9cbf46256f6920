"""Graphs with loaded regions: correct for some data, and wrong for others.

Both backends can run them; the widths suit them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from etc_dist.ir import Graph, device_function, graph_function, span, tile
from tests.graphs.calls import one_call
from tests.graphs.permute import move_row

Array = np.ndarray[Any, Any]
WIDTH, SEQUENCES, ROWS = 4, 4, 10
SOURCE = Path(__file__).with_suffix(".cuh")


@device_function(source=SOURCE, reads=2, writes=1)
def score_row(query: Array, key: Array, score: Array) -> None:
    score[...] = (query * key).sum()


@device_function(source=SOURCE, reads=2, writes=1)
def weigh_rows(scores: Array, values: Array, y: Array) -> None:
    y[...] = (scores[:, None] * values).sum(axis=0)


@graph_function
def ragged_attention(g: Graph, *, waits: bool = True) -> None:
    """y[s] is the sum of the values of sequence s, weighted by their scores. The rows
    of a sequence are data. Without `waits`, no event orders the two calls."""
    rows = g.dims("rows")
    first, count = (g.input(n, (SEQUENCES,), "int32") for n in ("first", "count"))
    query = g.input("query", (1, WIDTH), "float32")
    keys, values = (g.input(n, (rows, WIDTH), "float32") for n in ("keys", "values"))
    y = g.output("y", (SEQUENCES, WIDTH), "float32")
    scores = g.local("scores", (rows,), "float32")
    scored = g.events("scored", (1,), expects=rows)
    (r,) = grid = g.grid(r=rows)
    g.call(
        score_row,
        grid,
        reads=[query[0, :], keys[r, :]],
        writes=[scores[tile(r, 1)]],
        notifies=[scored[0]] if waits else [],
    )
    (s,) = grid = g.grid(s=SEQUENCES)
    sequence_rows = span(first.load(s), count.load(s))
    g.call(
        weigh_rows,
        grid,
        reads=[scores[sequence_rows], values[sequence_rows, :]],
        writes=[y[s, :]],
        waits=[scored[0]] if waits else [],
    )


scatter = partial(
    one_call,
    function=move_row,
    reads=[f"x rows/1 {WIDTH} float32"],
    writes=[f"y rows[span(place.load(i), 1)] {WIDTH} float32"],
    dims="rows",
    parts="input place [rows] int32",
)
"""y[place[i]] = x[i]: every row of y is written if place is a permutation."""


def sequences(seed: int = 0) -> dict[str, Array]:
    """Inputs of ragged_attention: sequences of 1, 2, 3 and 4 rows, in an order that
    the seed decides."""
    rng = np.random.default_rng(seed)
    count = rng.permutation([1, 2, 3, 4]).astype(np.int32)
    floats = {"query": (1, WIDTH), "keys": (ROWS, WIDTH), "values": (ROWS, WIDTH)}
    arrays = {n: rng.integers(-9, 9, s).astype("f4") for n, s in floats.items()}
    return {"first": np.cumsum(count, dtype="i4") - count, "count": count, **arrays}


def attended(arrays: dict[str, Array]) -> Array:
    """The reference of y."""
    scores = arrays["keys"] @ arrays["query"][0]
    parts = zip(arrays["first"], arrays["count"], strict=True)
    return np.stack([scores[f : f + c] @ arrays["values"][f : f + c] for f, c in parts])


def scattered(place: Any) -> dict[str, Array]:
    """Inputs of scatter."""
    to = np.array(place, np.int32)
    x = np.arange(to.size * WIDTH, dtype=np.float32).reshape(-1, WIDTH)
    return {"place": to, "x": x}
