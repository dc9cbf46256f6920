"""The sum over ranks of x @ w.T, of which each rank stores its part on all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from etc_dist.functions.epilogue import store_on_ranks
from etc_dist.functions.sum_ranks import sum_ranks
from etc_dist.functions.tile_matmul import Tiles
from etc_dist.functions.tile_shape import TileShape
from etc_dist.ir import Graph, graph_function, span
from etc_dist.ops.tile_order import tile_grid
from tests.layers.reference import Answer, draw


@graph_function
def summed(g: Graph, *, shapes: Sequence[TileShape], shift: int = 0) -> None:
    """shift: of the copies against the place on the own rank, which is wrong."""
    m, n, k, shape = g.dims("m n k shape")
    x, w = g.input("x", (m, k), "bfloat16"), g.input("w", (n, k), "bfloat16")
    y = g.output("y", (m, n), "bfloat16")
    world = g.world_size
    slots = g.symmetric("slots", (world, m, n), "bfloat16")
    tiles = Tiles(g, "tile", shape, shapes, has_peers=True)
    of = tile_grid(g, "", (m, n), tiles.rows, tiles.columns)
    arrivals = g.events(
        "arrived", (1,), expects=world * of.down * of.across, cross_rank=True
    )
    ranks = [(g.rank + d) % world for d in range(1, world)]
    slot = (g.rank, of.rows, of.columns)
    moved = (g.rank + shift, of.rows, of.columns)
    g.call(
        tiles.matmul("bfloat16", store_on_ranks(world)),
        of.grid,
        reads=[x[of.rows, :], w[of.columns, :]],
        writes=[slots[slot], *(slots.on(rank)[moved] for rank in ranks)],
        notifies=[arrivals[0], *(arrivals.on(rank)[0] for rank in ranks)],
        order=of.order,
        values=tiles.values,
    )
    (r,) = grid = g.grid(r=m)
    g.call(
        sum_ranks("bfloat16"),
        grid,
        reads=[slots[:, span(r, 1), :]],
        writes=[y[span(r, 1), :]],
        waits=[arrivals[0]],
    )


def summed_given(ranks: int, m: int, n: int, k: int) -> Any:
    """The inputs of each rank, and their results."""
    rng = np.random.default_rng(m + n)
    inputs = [
        {"x": draw(rng, (m, k), "bfloat16"), "w": draw(rng, (n, k), "bfloat16")}
        for _ in range(ranks)
    ]
    pairs = [[a.astype(np.float32) for a in arrays.values()] for arrays in inputs]
    total = sum(x @ w.T for x, w in pairs)
    most = sum(np.abs(x) @ np.abs(w).T for x, w in pairs)
    return inputs, [Answer(total, most)] * ranks
