"""GEMM + Reduce-Scatter with partial sums in fp32."""

from __future__ import annotations

from etc_dist.functions.add_partials import add_partials
from etc_dist.functions.grouped_matmul import grouped_float
from etc_dist.functions.matmul import TILE
from etc_dist.functions.sum_slots import PIECE_COLUMNS, PIECE_ROWS
from etc_dist.ir import Graph, ceildiv, graph_function, minimum, span, tile
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
    owner piece by piece. The owner adds the ranks' partial sums in rank order. Sends
    twice the bytes of `matmul_reduce_scatter_graph`."""
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
    ready = g.events(
        "ready", (blocks, columns), expects=world * pieces, cross_rank=True
    )

    d, i, j = grid = g.grid(d=world, i=blocks, j=columns)
    height = minimum(size, rows - i * size)
    g.call(
        grouped_float(dtype),
        grid,
        reads=[x[span(d * rows + i * size, height), :], w[tile(j, wide), :]],
        writes=[partials[d, span(i * size, height), tile(j, wide)]],
        notifies=[produced[d, i, j]],
        order=lambda t: rotated_owners(t, world, blocks, columns, 1),
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
        reads=[partials[span(d, 1), *of_piece]],
        writes=[slots.on(d)[g.rank, *of_piece]],
        waits=[produced[d, i, j]],
        notifies=[ready.on(d)[i, j]],
        order=lambda t: (
            *rotated_owners(t // pieces, world, blocks, columns, 1),
            t // across % down,
            t % across,
        ),
    )
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
