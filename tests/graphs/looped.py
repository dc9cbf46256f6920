"""Graphs with loops, which both backends can run: a residual stack of layers, and steps
of several layers each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from etc_dist.functions.push_rows import push_rows
from etc_dist.ir import (
    Expr,
    Graph,
    device_function,
    equal,
    graph_function,
    select,
    tile,
)

Array = np.ndarray[Any, Any]
Map = Callable[[Expr], Expr]
TILE, ROWS = 4, 3
SOURCE = Path(__file__).with_suffix(".cuh")


@device_function(source=SOURCE, reads=3, writes=2)
def add_layer(x: Array, residual: Array, w: Array, state: Array, part: Array) -> None:
    """A tile of x + normalized(x) @ w; the product is added to `state`."""
    scale = 1 / np.sqrt((x * x).mean(axis=1, keepdims=True) + 1)
    product = (x * scale) @ w
    state += product
    part[...] = residual + product


@graph_function
def residual_layers(
    g: Graph,
    *,
    buffer: Map = lambda layer: layer % 2,
    wait: Map = lambda layer: layer,
    turns: int = 0,
) -> None:
    """y = x after all layers; each rank has a share of the columns of every layer, and
    adds its products to its state `state`. The options plant faults: the buffer that a
    layer reads, the layer whose input it waits for, more turns than layers."""
    layers, rows, n, share = g.dims("layers rows n share")
    num_tiles, world = g.let("tiles", share // TILE), g.world_size
    x, y = g.input("x", (rows, n), "float32"), g.output("y", (rows, n), "float32")
    w = g.input("w", (layers, n, share), "float32")
    state = g.state("kept", (layers, rows, share), "float32")
    hidden = g.symmetric("hidden", (2, rows, n), "float32")
    part = g.local("part", (2, rows, share), "float32")

    def sent(layer: Expr) -> Expr:
        return select(equal(layer, 0), 1, num_tiles * rows * world)

    ready = g.events("ready", (layers + 1,), expects=sent, cross_rank=True)
    computed = g.events("computed", (layers, num_tiles), expects=1)
    g.call(
        push_rows(),
        g.grid(one=1),
        name="first",
        reads=[x[:, :]],
        writes=[hidden[0, :, :]],
        notifies=[ready[0]],
    )
    with g.loop(layer=layers + turns) as layer:
        (j,) = grid = g.grid(j=num_tiles)
        columns = tile(g.rank * num_tiles + j, TILE)
        g.call(
            add_layer,
            grid,
            reads=[
                hidden[buffer(layer), :, :],
                hidden[buffer(layer), :, columns],
                w[layer, :, tile(j, TILE)],
            ],
            writes=[state[layer, :, tile(j, TILE)], part[layer % 2, :, tile(j, TILE)]],
            waits=[ready[wait(layer)]],
            notifies=[computed[layer, j]],
        )
        d, r, k = grid = g.grid(d=world, r=rows, k=num_tiles)
        g.call(
            push_rows(),
            grid,
            name="send",
            reads=[part[layer % 2, r, tile(k, TILE)]],
            writes=[
                hidden.on(d)[buffer(layer + 1), r, tile(g.rank * num_tiles + k, TILE)]
            ],
            waits=[computed[layer, k]],
            notifies=[ready.on(d)[layer + 1]],
        )
    g.call(
        push_rows(),
        g.grid(two=1),
        name="last",
        reads=[hidden[buffer(layers), :, :]],
        writes=[y[:, :]],
        waits=[ready[layers]],
    )


def dims_of(layers: int, world: int) -> dict[str, int]:
    return {"layers": layers, "rows": ROWS, "n": 8 * world, "share": 8}


def inputs(layers: int, world: int) -> list[dict[str, Array]]:
    """The arrays of each rank; x is the same on all."""
    rng = np.random.default_rng(layers)
    n = 8 * world
    x = rng.standard_normal((ROWS, n)).astype(np.float32)
    w = rng.standard_normal((layers, n, n)).astype(np.float32) / 4
    shares = np.split(w, world, axis=2)
    state = np.ones((layers, ROWS, 8), np.float32)
    return [
        {"x": x, "w": np.ascontiguousarray(s), "kept": state.copy()} for s in shares
    ]


def expected(arrays_of_ranks: list[dict[str, Array]]) -> list[dict[str, Array]]:
    """y and kept of each rank after a run."""
    x, states = (
        arrays_of_ranks[0]["x"],
        [arrays["kept"].copy() for arrays in arrays_of_ranks],
    )
    for layer in range(len(states[0])):
        scale = 1 / np.sqrt((x * x).mean(axis=1, keepdims=True) + 1)
        products = [(x * scale) @ arrays["w"][layer] for arrays in arrays_of_ranks]
        for state, product in zip(states, products, strict=True):
            state[layer] += product
        x = x + np.concatenate(products, axis=1)
    return [{"y": x, "kept": state} for state in states]


@device_function(source=SOURCE, reads=1, writes=1, lane="transfer")
def count_up(before: Array, after: Array) -> None:
    after[...] = before + 1


@device_function(source=SOURCE, reads=1, writes=1)
def double_up(before: Array, after: Array) -> None:
    after[...] = 2 * before


@graph_function
def steps_of_layers(g: Graph) -> None:
    """Loops inside of a loop: a step counts up, doubles once a layer, and counts up
    again; y [steps, 4] is the result after each step."""
    steps, layers = g.dims("steps layers")
    x, y = g.input("x", (4,), "float32"), g.output("y", (steps, 4), "float32")
    g.state("sizes", (steps, layers, 4), "float32")
    rows = g.local("rows", (steps, layers + 1, 4), "float32")
    ends = g.local("ends", (steps + 1, 1, 4), "float32")
    begin_event = g.events("begun", (steps + 1,), expects=1)
    layer_events = g.events("done", (steps, layers + 1), expects=1)

    def add(function: Any, name: str, **regions: Any) -> None:
        g.call(function, g.grid(one=1), name=name, **regions)

    add(
        push_rows(),
        "start",
        reads=[x[:]],
        writes=[ends[0, 0, :]],
        notifies=[begin_event[0]],
    )
    with g.loop(step=steps) as step:
        add(
            count_up,
            "enter",
            reads=[ends[step, 0, :]],
            writes=[rows[step, 0, :]],
            waits=[begin_event[step]],
            notifies=[layer_events[step, 0]],
        )
        with g.loop(layer=layers) as layer:
            add(
                double_up,
                "double",
                reads=[rows[step, layer, :]],
                writes=[rows[step, layer + 1, :]],
                waits=[layer_events[step, layer]],
                notifies=[layer_events[step, layer + 1]],
            )
        add(
            count_up,
            "leave",
            reads=[rows[step, layers, :]],
            writes=[ends[step + 1, 0, :]],
            waits=[layer_events[step, layers]],
            notifies=[begin_event[step + 1]],
        )
        add(
            push_rows(),
            "keep",
            reads=[ends[step + 1, 0, :]],
            writes=[y[step, :]],
            waits=[begin_event[step + 1]],
        )


def stepped(x: Array, steps: int, layers: int) -> Array:
    """y of steps_of_layers."""
    rows = []
    for _ in range(steps):
        x = (x + 1) * 2**layers + 1
        rows.append(x)
    return np.stack(rows)
