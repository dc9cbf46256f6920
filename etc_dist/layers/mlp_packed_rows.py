"""The graph of the dense MLP for ranks whose rows do not fill whole tiles."""

from __future__ import annotations

from etc_dist.functions.matmul import TILE, matmul_gated, matmul_store
from etc_dist.functions.push_rows import push_rows
from etc_dist.functions.sum_ranks import sum_ranks
from etc_dist.ir import Graph, ceildiv, graph_function, minimum, span, tile
from etc_dist.layers.mlp_steps import add_tensors

SUMMED = 1024
"""Columns of a row whose parts one warp adds."""
PACKED_SHARE = 0.75
"""Of the tiles that ranks have apart; rows that fill fewer together are packed."""


def are_packed(world_size: int, rows: int) -> bool:
    """Whether so many rows a rank fill that much fewer tiles together than apart."""
    together, apart = -(-world_size * rows // TILE), world_size * -(-rows // TILE)
    return together < PACKED_SHARE * apart


def most_packed(world_size: int) -> int:
    """The most rows a rank that are packed; 0 if none are. Four tiles and more of a
    rank's own are never so empty."""
    return max((r for r in range(1, 3 * TILE) if are_packed(world_size, r)), default=0)


@graph_function
def mlp_packed_rows_graph(
    g: Graph,
    *,
    dtype: str = "bfloat16",
    tile_size: int = TILE,
    summed: int = SUMMED,
) -> None:
    """x [rows, hidden] on each rank -> y [rows, hidden], the same rows.

    As `mlp_graph`, but a tile has rows of several ranks: every rank gathers the rows of
    all; a row of the down projection goes to its owner once all of its
    tiles are computed, and the owner adds the ranks' in fp32. Tiles of the same columns
    come one after the other, for they share the weights.
    """
    x, y, (gate, up), down = add_tensors(g, dtype)
    (rows, hidden), (_, inner) = x.shape, down.shape
    world, size = g.world_size, tile_size
    tokens = g.let("tokens", world * rows)
    blocks = g.let("blocks", ceildiv(tokens, size))
    wide = g.let("wide", ceildiv(inner, size // 2))
    columns = g.let("columns", ceildiv(hidden, size))

    all_x = g.symmetric("all_x", (tokens, hidden), dtype)
    arrived = g.events(
        "arrived",
        (blocks,),
        expects=lambda i: minimum(size, tokens - i * size),
        cross_rank=True,
    )
    p, r = grid = g.grid(p=world, r=rows)
    to = (g.rank + (world - 1) - p) % world
    g.call(
        push_rows(),
        grid,
        reads=[x[span(r, 1), :]],
        writes=[all_x.on(to)[span(g.rank * rows + r, 1), :]],
        notifies=[arrived.on(to)[(g.rank * rows + r) // size]],
    )

    active = g.local("active", (tokens, inner), dtype)
    activated = g.events("activated", (blocks,), expects=wide)
    i, j = grid = g.grid(i=blocks, j=wide)
    g.call(
        matmul_gated(dtype),
        grid,
        name="gate_up_projection",
        reads=[
            all_x[tile(i, size), :],
            *(w[tile(j, size // 2), :] for w in (gate, up)),
        ],
        writes=[active[tile(i, size), tile(j, size // 2)]],
        waits=[arrived[i]],
        notifies=[activated[i]],
        order=lambda t: (t % blocks, t // blocks),
    )
    product = g.local("product", (tokens, hidden), dtype)
    produced = g.events("produced", (blocks,), expects=columns)
    i, j = grid = g.grid(i=blocks, j=columns)
    g.call(
        matmul_store("nk", dtype),
        grid,
        name="down_projection",
        reads=[active[tile(i, size), :], down[tile(j, size), :]],
        writes=[product[tile(i, size), tile(j, size)]],
        waits=[activated[i]],
        notifies=[produced[i]],
        order=lambda t: (t % blocks, t // blocks),
    )

    parts = g.symmetric("parts", (world, rows, hidden), dtype)
    returned = g.events("returned", (rows,), expects=world, cross_rank=True)
    # One's own come last: they do not have to travel.
    p, r = grid = g.grid(p=world, r=rows)
    owner = (g.rank + 1 + p) % world
    g.call(
        push_rows(),
        grid,
        name="send_back",
        reads=[product[span(owner * rows + r, 1), :]],
        writes=[parts.on(owner)[g.rank, span(r, 1), :]],
        waits=[produced[(owner * rows + r) // size]],
        notifies=[returned.on(owner)[r]],
    )
    r, c = grid = g.grid(r=rows, c=g.let("pieces", ceildiv(hidden, summed)))
    of_piece = span(r, 1), tile(c, summed)
    g.call(
        sum_ranks(dtype),
        grid,
        reads=[parts[:, *of_piece]],
        writes=[y[of_piece]],
        waits=[returned[r]],
    )
