"""GEMM + Reduce-Scatter: y = the sum over ranks of x @ w.T, this rank's rows of it."""

from __future__ import annotations

from typing import Any

from etc_dist.compiler import world_or_current
from etc_dist.errors import expect_choice
from etc_dist.functions.matmul import TILE, matmul_send
from etc_dist.functions.sum_slots import PIECE_COLUMNS, PIECE_ROWS, sum_slots
from etc_dist.ir import (
    EventTensor,
    Graph,
    Tensor,
    ceildiv,
    graph_function,
    span,
    tile,
)
from etc_dist.ir.expr import Const
from etc_dist.ops.argument_table import ArgumentTable
from etc_dist.ops.float_partials import float_partials_graph
from etc_dist.ops.operation import Candidate, Operation
from etc_dist.ops.order import pieces_by_column, rotated_owners, split_tile
from etc_dist.world import World

COLUMN_GROUP = 1
"""Columns of tiles that are sent to all owners before the next ones: measured best."""


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
    into a slot of the rank that owns it; the owner adds the slots in rank order. On the
    CPU backend tile_size and piece, the part of a tile that one task sums, may have
    other values."""
    rows, n, k = g.dims("rows n k")
    world, size = g.world_size, tile_size
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

    add_sum_slots(g, slots, ready, y, piece)


def add_sum_slots(
    g: Graph, slots: Tensor, ready: EventTensor, y: Tensor, piece: tuple[int, int]
) -> None:
    """Add the reduction: y [rows, n] = the sum of slots [world, blocks, columns, size,
    size] over ranks. A piece is summed once its tile has come from all ranks."""
    _, blocks, columns, extent, _ = slots.shape
    assert isinstance(extent, Const)  # tiles have a fixed size
    size, (piece_rows, piece_columns) = extent.value, piece
    down, across = split_tile(g.name, size, piece)
    i, j, p, q = grid = g.grid(i=blocks, j=columns, p=down, q=across)
    g.call(
        sum_slots(y.dtype),
        grid,
        reads=[slots[:, i, j, tile(p, piece_rows), tile(q, piece_columns)]],
        writes=[
            y[
                span(i * size + p * piece_rows, piece_rows),
                span(j * size + q * piece_columns, piece_columns),
            ]
        ],
        waits=[ready[i, j]],
        order=lambda t: pieces_by_column(t, blocks, down, across),
    )


class MatmulReduceScatter(Operation):
    """GEMM + Reduce-Scatter as a reusable object.

    op(x, w, out=None, stream=None): x [M, K] and w [N, K] on every rank, each rank with
    its own values; returns out [M / world_size, N]: rows [rank * M / world_size, ...)
    of the sum over ranks of x @ w.T. w may be a transposed view, w.T of a contiguous
    [K, N] array. M is a multiple of the world size; on GPUs K and N are multiples of 8.

    The dtype is that of x, bfloat16 or float16. The ranks' partial sums are added in
    fp32 in rank order: the same bits on every run. Each is rounded to the dtype before
    it is sent; in float16 it must be within +-65504. partials="float32" keeps them in
    fp32, for twice the bytes between ranks; then w must be contiguous.

    Arrays: NumPy on the CPU backend; CuPy, torch, DLPack or `__cuda_array_interface__`
    on GPUs, not copied. A program is compiled at the first call of a dtype and of a
    layout of w. schedule, trace: as for `etc_dist.compile`. deterministic: "run" or
    "batch"; a row has the same bits for any M with both.

    Raises on every rank: ArgumentError if any rank's arrays do not fit or the ranks'
    shapes differ, TypeError if an argument of any rank has a wrong type.
    """

    def __init__(
        self,
        *,
        partials: str | None = None,
        world: World | None = None,
        schedule: str = "static",
        trace: bool | None = None,
        deterministic: str = "run",
    ):
        world = world_or_current(world)
        name = type(self).__name__
        with world.refusing(f"the options of {name}"):
            if partials is not None:
                expect_choice(partials, ["float32"], "partials")
        graph = float_partials_graph if partials else matmul_reduce_scatter_graph
        table = ArgumentTable(
            name,
            world,
            ["x [ranks * rows, k]", "w [n, k]"],
            "out [rows, n]",
            transposable="" if partials else "w",
        )
        super().__init__(
            table,
            [Candidate(graph, self.sizes)],
            world,
            schedule=schedule,
            trace=trace,
            deterministic=deterministic,
            options={"partials": partials},
            transposes=not partials,
        )
        self.partials = partials

    def __call__(self, x: Any, w: Any, out: Any = None, *, stream: Any = None) -> Any:
        return self._call((x, w), out, stream)
