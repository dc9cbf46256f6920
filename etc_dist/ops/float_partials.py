"""GEMM + Reduce-Scatter with partial sums in fp32."""

from __future__ import annotations

from etc_dist.functions.add_partials import add_partials
from etc_dist.functions.grouped_matmul import grouped_float
from etc_dist.functions.matmul import TILE
from etc_dist.functions.sum_pieces import sum_pieces
from etc_dist.functions.sum_slots import PIECE_COLUMNS, PIECE_ROWS
from etc_dist.ir import (
    Expr,
    Graph,
    Region,
    ceildiv,
    graph_function,
    minimum,
    span,
    tile,
)
from etc_dist.ops.host_sums import add_host_sums, host_after, near_owners, near_rank
from etc_dist.ops.order import pieces_by_column, rotated_owners, split_tile


@graph_function
def float_partials_graph(
    g: Graph,
    *,
    dtype: str = "bfloat16",
    tile_size: int = TILE,
    piece: tuple[int, int] = (PIECE_ROWS, PIECE_COLUMNS),
) -> None:
    """x [world * rows, k], w [n, k] -> y [rows, n] on each rank.

    A tile of tile_size x 2 * tile_size is computed into local memory, and sent to its
    owner piece by piece. The owner adds the ranks' partial sums in rank order (over
    several hosts see `add_host_sums`). Sends twice the bytes of
    `matmul_reduce_scatter_graph`."""
    (piece_rows, piece_columns), size, wide = piece, tile_size, 2 * tile_size
    down, across = split_tile(g.name, size, piece)
    across *= wide // size
    pieces = down * across
    rows, n, k = g.dims("rows n k")
    world = g.world_size
    blocks = g.let("blocks", ceildiv(rows, size))
    columns = g.let("columns", ceildiv(n, wide))
    x = g.input("x", (world * rows, k), dtype)
    w = g.input("w", (n, k), dtype)
    y = g.output("y", (rows, n), dtype)
    partials = g.local("partials", (world, rows, n), "float32")
    slots = g.symmetric("slots", (world, rows, n), "float32")
    produced = g.events("produced", (world, blocks, columns), expects=1)
    near = g.local_size
    hosts = world // near
    ready = g.events(
        "ready",
        (blocks, columns) if hosts == 1 else (hosts, blocks, columns),
        expects=near * pieces,
        cross_rank=True,
    )

    def order(t: Expr) -> tuple[Expr, Expr, Expr]:
        if hosts == 1:
            return rotated_owners(t, world, blocks, columns, 1)
        s, o, i, j = near_owners(g, t, blocks, columns, 1)
        return s * near + o, i, j

    d, i, j = grid = g.grid(d=world, i=blocks, j=columns)
    owner, at, slot, host = _owner(g, d)
    height = minimum(size, rows - i * size)
    g.call(
        grouped_float(dtype),
        grid,
        reads=[x[span(owner * rows + i * size, height), :], w[tile(j, wide), :]],
        writes=[partials[owner, span(i * size, height), tile(j, wide)]],
        notifies=[produced[owner, i, j]],
        order=order,
    )
    d, i, j, p, q = grid = g.grid(d=world, i=blocks, j=columns, p=down, q=across)
    of_piece = (
        span(i * size + p * piece_rows, piece_rows),
        span(j * wide + q * piece_columns, piece_columns),
    )
    g.call(
        add_partials("float32"),
        grid,
        name="send_piece",
        reads=[partials[span(owner, 1), *of_piece]],
        writes=[slots.on(at)[slot, *of_piece]],
        waits=[produced[owner, i, j]],
        notifies=[ready.on(at)[*host, i, j]],
        order=lambda t: (
            *order(t // pieces),
            t // across % down,
            t % across,
        ),
    )
    if hosts > 1:

        def of_host(s: Expr | int, r: Expr, j: Expr, q: Expr) -> Region:
            rows_of_piece = span(r * piece_rows, piece_rows)
            first = j * wide + q * piece_columns
            return slots[
                span(s * near, near), rows_of_piece, span(first, piece_columns)
            ]

        add_host_sums(
            g,
            sum_pieces("float32", "float32"),
            of_host,
            ready,
            y,
            tile_shape=(size, wide),
            piece=piece,
            partials="float32",
        )
        return
    i, j, p, q = grid = g.grid(i=blocks, j=columns, p=down, q=across)
    of_piece = (
        span(i * size + p * piece_rows, piece_rows),
        span(j * wide + q * piece_columns, piece_columns),
    )
    g.call(
        add_partials(dtype),
        grid,
        name="sum_ranks",
        reads=[slots[:, *of_piece]],
        writes=[y[of_piece]],
        waits=[ready[i, j]],
        order=lambda t: pieces_by_column(t, blocks, down, across),
    )


def _owner(g: Graph, d: Expr) -> tuple[Expr, Expr, Expr, tuple[Expr, ...]]:
    """Of the d-th owner of rows: its rank, the rank and slot for this rank's sums, and
    its host, if there are several."""
    near = g.local_size
    if near == g.world_size:
        return d, d, g.rank, ()
    s = d // near
    owner = host_after(g, s) * near + d % near
    return owner, near_rank(g, d % near), s * near + g.rank % near, (s,)
