"""GEMM + Reduce-Scatter: y = the sum over ranks of x @ w.T, this rank's rows of it."""

from __future__ import annotations

from collections.abc import Mapping

from etc_dist.ir import Graph, ceildiv, graph_function, span, tile
from etc_dist.ops.matmul import TILE, matmul_send
from etc_dist.ops.operation import Operation
from etc_dist.ops.order import rotated_owners
from etc_dist.ops.sum_slots import PIECE_COLUMNS, PIECE_ROWS, sum_slots
from etc_dist.runtime.arrays import Array

COLUMN_GROUP = 1
"""Columns of tiles that all owners get before the next ones: measured best."""


@graph_function
def matmul_reduce_scatter_graph(
    g: Graph,
    *,
    dtype: str = "bfloat16",
    w_layout: str = "nk",
    tile_size: int = TILE,
    piece: tuple[int, int] = (PIECE_ROWS, PIECE_COLUMNS),
) -> None:
    """x [world, rows, k], w [n, k] or [k, n] -> y [rows, n] on each rank.

    Every rank computes its partial sum of all rows, tile by tile, and pushes each tile
    into a slot of the rank that owns it; the owner adds the slots in rank order. The
    tile size and the piece of a tile that one task sums are fixed on the GPU and free
    on the CPU backend."""
    rows, n, k = g.dims("rows n k")
    world, size, (piece_rows, piece_columns) = g.world_size, tile_size, piece
    blocks = g.let("blocks", ceildiv(rows, size))
    columns = g.let("columns", ceildiv(n, size))
    x = g.input("x", (world, rows, k), dtype)
    w = g.input("w", (n, k) if w_layout == "nk" else (k, n), dtype)
    y = g.output("y", (rows, n), dtype)
    slots = g.symmetric("slots", (world, blocks, columns, size, size), dtype)
    ready = g.events("ready", (blocks, columns), expects=world, cross_rank=True)

    d, i, j = grid = g.grid(d=world, i=blocks, j=columns)
    g.call(
        matmul_send(w_layout, dtype),
        grid,
        reads=[
            x[d, tile(i, size), :],
            w[tile(j, size), :] if w_layout == "nk" else w[:, tile(j, size)],
        ],
        writes=[slots.on(d)[g.rank, i, j, :, :]],
        notifies=[ready.on(d)[i, j]],
        order=lambda t: rotated_owners(t, world, blocks, columns, COLUMN_GROUP),
    )

    down, across = size // piece_rows, size // piece_columns
    pieces = down * across
    i, j, p, q = grid = g.grid(i=blocks, j=columns, p=down, q=across)
    g.call(
        sum_slots(dtype),
        grid,
        reads=[slots[:, i, j, tile(p, piece_rows), tile(q, piece_columns)]],
        writes=[
            y[
                span(i * size + p * piece_rows, piece_rows),
                span(j * size + q * piece_columns, piece_columns),
            ]
        ],
        waits=[ready[i, j]],
        order=lambda t: (
            t // pieces % blocks,
            t // (pieces * blocks),
            t // across % down,
            t % across,
        ),
    )


class MatmulReduceScatter(Operation):
    """GEMM + Reduce-Scatter as a reusable object.

    op(x, w, out=None, stream=None): x [M, K] and w [N, K] (or [K, N]) on every rank,
    each rank with its own values; returns out [M / world_size, N]: rows [rank * M /
    world_size, ...) of the sum over ranks of x @ w.T, added in fp32 in rank order
    (the same bits on every run). M is a multiple of the world size; on GPUs K and N are
    multiples of 8. Arrays: NumPy on the CPU backend; CuPy, torch, DLPack or
    `__cuda_array_interface__` on GPUs, contiguous, not copied. Raises ArgumentError
    on every rank if any rank's arguments do not fit or the ranks' shapes differ.
    """

    graph_function = staticmethod(matmul_reduce_scatter_graph)

    def _rows(self, m: int) -> int:
        if m % self.world.size:
            raise self._misfit(f"M a multiple of {self.world.size}", f"M = {m}")
        return m // self.world.size

    def _output_shape(self, m: int, n: int) -> tuple[int, int]:
        return m // self.world.size, n

    def _tensors(
        self, x: Array, w: Array, y: Array, dims: Mapping[str, int]
    ) -> dict[str, Array]:
        stacked = (self.world.size, dims["rows"], dims["k"])
        return {"x": x.reshape(stacked), "w": w, "y": y}
