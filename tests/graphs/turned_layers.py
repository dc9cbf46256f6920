"""A graph with a loop over matmuls and tasks between them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from etc_dist.functions.wide_tile import WIDE, RowTiles
from etc_dist.ir import Graph, device_function, graph_function, span
from etc_dist.ir.tensor import numpy_dtype
from tests.emulate.cases import Example
from tests.layers.reference import Answer

ROWS, N = 5, 64


@device_function(source=Path(__file__).with_name("turn_row.cuh"), reads=1, writes=1)
def turn_row(source, to):
    to[...] = source[..., ::-1]


@graph_function
def turned_layers(g: Graph) -> None:
    """In each layer x @ w[layer].T, and then each row in reverse order; both are kept
    for all layers, one below the other."""
    layers = g.dims("layers")
    x = g.input("x", (ROWS, N), "bfloat16")
    w = g.input("w", (layers, N, N), "bfloat16")
    product = g.state("product", (layers, ROWS, N), "bfloat16")
    turned = g.state("turned", ((layers + 1) * ROWS, N), "bfloat16")
    ready = g.events("ready", (layers + 1,), expects=ROWS)
    layer_events = g.events("done", (layers,), expects=1)
    (r,) = rows = g.grid(r=ROWS)
    g.call(turn_row, rows, name="begin", reads=[x[r : r + 1, :]],
           writes=[turned[r : r + 1, :]], notifies=[ready[0]])  # fmt: skip
    tiles = RowTiles(g, "tiles")
    with g.loop(layer=layers) as layer:
        g.call(
            tiles.matmul_rows("bfloat16"),
            g.grid(i=1),
            values=tiles.values,
            reads=[turned[span(layer * ROWS, ROWS), :], w[layer, 0 : WIDE.columns, :]],
            writes=[product[layer, 0:ROWS, 0 : WIDE.columns]],
            waits=[ready[layer]],
            notifies=[layer_events[layer]],
        )
        (i,) = grid = g.grid(j=ROWS)
        g.call(
            turn_row,
            grid,
            reads=[product[layer, i : i + 1, :]],
            writes=[turned[span((layer + 1) * ROWS + i, 1), :]],
            waits=[layer_events[layer]],
            notifies=[ready[layer + 1]],
        )
    g.call(turn_row, g.grid(one=1), name="last",
           reads=[turned[span(layers * ROWS, 1), :]],
           writes=[g.output("y", (1, N), "bfloat16")[:, :]],
           waits=[ready[layers]])  # fmt: skip


def layers_to_turn(layers: int) -> dict[str, np.ndarray]:
    """Arrays for turned_layers, whose results are exact."""
    rng, dtype = np.random.default_rng(layers), numpy_dtype("bfloat16")
    x = rng.integers(-2, 3, (ROWS, N))
    w = np.stack([np.eye(N)[rng.permutation(N)] for _ in range(layers)])
    arrays = {"x": x.astype(dtype), "w": w.astype(dtype)}
    product = np.zeros((layers, ROWS, N), dtype)
    return {
        **arrays,
        "product": product,
        "turned": np.zeros(((layers + 1) * ROWS, N), dtype),
    }


def products_of(arrays: dict[str, np.ndarray]) -> list[np.ndarray]:
    """The product of each layer."""
    rows, products = arrays["x"].astype(np.float32)[:, ::-1], []
    for w in arrays["w"].astype(np.float32):
        products.append(rows @ w.T)
        rows = products[-1][:, ::-1]
    return products


def turned() -> Example:
    arrays = layers_to_turn(3)
    y = products_of(arrays)[-1][:1]
    return [arrays], [Answer(y, np.abs(y))], {"layers": 3}
