"""A graph with loaded dependencies: rows sorted by their experts.

Both backends can run it; the widths suit them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from etc_dist.ir import Expr, Graph, device_function, graph_function, span, tile

Array = np.ndarray[Any, Any]
EXPERTS, WIDTH = 4, 4
SOURCE = Path(__file__).with_suffix(".cuh")


@device_function(source=SOURCE, reads=1, writes=3)
def plan_rows(expert: Array, count: Array, first: Array, place: Array) -> None:
    experts = np.arange(len(count))
    count[:] = (expert[:, None] == experts).sum(axis=0)
    first[:] = (expert[:, None] < experts).sum(axis=0)
    place[np.argsort(expert, kind="stable")] = np.arange(len(expert))


@device_function(source=SOURCE, reads=1, writes=1, lane="transfer")
def move_row(x: Array, packed: Array) -> None:
    packed[...] = x


@device_function(source=SOURCE, reads=1, writes=1)
def double_rows(packed: Array, y: Array) -> None:
    assert y.size, "an expert without rows runs no body"
    y[...] = 2 * packed


@graph_function
def permute(
    g: Graph,
    *,
    move_waits: bool = True,
    double_waits: bool = True,
    miscounted: int = 0,
    shifted: int = 0,
) -> None:
    """y = 2 x, sorted by expert. The options plant faults: a missing wait for the
    loaded tensor, a wrong expected count, rows moved out of range."""
    n = g.dims("n")
    expert = g.input("expert", (n,), "int32")
    x = g.input("x", (n, WIDTH), "float32")
    y = g.output("y", (n, WIDTH), "float32")
    count = g.local("count", (EXPERTS,), "int32")
    first = g.local("first", (EXPERTS,), "int32")
    place = g.local("place", (n,), "int32")
    packed = g.local("packed", (n, WIDTH), "float32")
    plan_event = g.events("planned", (1,), expects=1)

    def wanted(e: Expr) -> Expr:
        return count.load(e) + miscounted

    filled = g.events("filled", (EXPERTS,), expects=wanted)
    g.call(
        plan_rows,
        g.grid(one=1),
        reads=[expert[:]],
        writes=[count[:], first[:], place[:]],
        notifies=[plan_event[0]],
    )
    (i,) = rows = g.grid(i=n)
    g.call(
        move_row,
        rows,
        reads=[x[tile(i, 1), :]],
        writes=[packed[span(place.load(i) + shifted, 1), :]],
        waits=[plan_event[0]] if move_waits else [],
        notifies=[filled[expert.load(i)]],
    )
    (e,) = experts = g.grid(e=EXPERTS)
    expert_rows = span(first.load(e), count.load(e))
    g.call(
        double_rows,
        experts,
        reads=[packed[expert_rows, :]],
        writes=[y[expert_rows, :]],
        waits=[filled[e], *([plan_event[0]] if double_waits else [])],
    )


def inputs(expert: Any) -> dict[str, Array]:
    experts = np.array(expert, np.int32)
    x = np.arange(experts.size * WIDTH, dtype=np.float32).reshape(-1, WIDTH)
    return {"expert": experts, "x": x}


def computed(expert: Any) -> dict[str, Array]:
    """The results of the planning task."""
    experts = np.array(expert, np.int32)
    count, first, place = (
        np.zeros(k, np.int32) for k in (EXPERTS, EXPERTS, experts.size)
    )
    plan_rows.body(experts, count, first, place)
    return {"count": count, "first": first, "place": place}


def reference(expert: Any) -> list[list[float]]:
    arrays = inputs(expert)
    order = np.argsort(arrays["expert"], kind="stable")
    rows: list[list[float]] = (2 * arrays["x"][order]).tolist()
    return rows
