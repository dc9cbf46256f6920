"""A graph whose last task reads one operand before its last wait is met."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from etc_dist.ir import (
    EventRef,
    Graph,
    Region,
    Tensor,
    device_function,
    graph_function,
    span,
    tile,
)

Array = np.ndarray[Any, Any]
WIDTH = 4
SOURCE = Path(__file__).with_suffix(".cuh")


@device_function(source=SOURCE, reads=1, writes=1)
def negate(x: Array, y: Array) -> None:
    y[...] = -x


@device_function(source=SOURCE, reads=2, writes=1, reads_before_wait=[0])
def add_if_even(first: Array, second: Array, y: Array) -> None:
    y[...] = np.where(first % 2 == 0, first + second, first)


@graph_function
def early(
    g: Graph, *, gathers: bool = False, notifies: bool = True, loops: bool = False
) -> None:
    """y = -a of the odd rows, -a + b of the others; z = -b once y is there. If it
    `gathers`, rows of b come in the order that `at` says, and so workers draw tickets.
    Without `notifies`, the last wait is never met. loops: in a loop of one turn."""
    n = g.dims("n")
    a, b = (g.input(name, (n, WIDTH), "int32") for name in "ab")
    at = g.input("at", (n,), "int32")
    y, z = (g.output(name, (n, WIDTH), "int32") for name in "yz")
    first, minus, second = (
        g.local(name, (n, WIDTH), "int32") for name in ("first", "minus", "second")
    )
    first_events, turned, there, end_events = (
        g.events(name, (n,), expects=1) for name in ("known", "turned", "there", "done")
    )
    with g.loop(turn=1) if loops else nullcontext():
        (i,) = rows = g.grid(i=n)
        row = tile(i, 1)
        operand = b[span(at.load(i), 1) if gathers else row, :]

        def turn(name: str, x: Region, to: Tensor, **events: list[EventRef]) -> None:
            g.call(negate, rows, name=name, reads=[x], writes=[to[row, :]], **events)

        last_events = [there[i]] if notifies else []
        turn("first_of", a[row, :], first, notifies=[first_events[i]])
        turn("minus_of", operand, minus, waits=[first_events[i]], notifies=[turned[i]])
        turn(
            "second_of", minus[row, :], second, waits=[turned[i]], notifies=last_events
        )
        g.call(
            add_if_even,
            rows,
            reads=[first[row, :], second[row, :]],
            writes=[y[row, :]],
            waits=[first_events[i], there[i]],
            notifies=[end_events[i]],
        )
        turn("last_of", second[row, :], z, waits=[end_events[i]])


def inputs(n: int, seed: int) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    a, b = (rng.integers(-99, 99, (n, WIDTH), np.int32) for _ in "ab")
    a[...] = a[:, :1]  # rows are odd or even as a whole
    return {"a": a, "b": b, "at": np.arange(n, dtype=np.int32)}


def reference(arrays: dict[str, Array]) -> dict[str, Array]:
    a, b = arrays["a"], arrays["b"]
    return {"y": np.where(a % 2 == 0, b - a, -a), "z": -b}
