"""GEMM + Reduce-Scatter: y = the sum over ranks of x @ w.T, this rank's rows of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from etc_dist.errors import ArgumentError
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
from etc_dist.ops.arguments import refuse_unknown
from etc_dist.ops.float_partials import float_partials_graph
from etc_dist.ops.operation import Fitted
from etc_dist.ops.order import rotated_owners
from etc_dist.ops.product import ProductOperation
from etc_dist.runtime.arrays import Array
from etc_dist.world import World, given_world

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
    size] over ranks, piece by piece, each as soon as its tile is ready from all."""
    _, blocks, columns, extent, _ = slots.shape
    assert isinstance(extent, Const)  # tiles have a fixed size
    size, (piece_rows, piece_columns) = extent.value, piece
    if size % piece_rows or size % piece_columns:
        raise ArgumentError(
            "tiles cannot be cut into pieces",
            where=g.name,
            wanted="tile_size: a multiple of both numbers of piece",
            got=f"tile_size = {size}, piece = {tuple(piece)}",
            fix="give both, tile_size and piece, as options",
        )
    down, across = size // piece_rows, size // piece_columns
    pieces = down * across
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
        order=lambda t: (
            t // pieces % blocks,
            t // (pieces * blocks),
            t // across % down,
            t % across,
        ),
    )


class MatmulReduceScatter(ProductOperation):
    """GEMM + Reduce-Scatter as a reusable object.

    op(x, w, out=None, stream=None): x [M, K] and w [N, K] (or [K, N]) on every rank,
    each rank with its own values; returns out [M / world_size, N]: rows [rank * M /
    world_size, ...) of the sum over ranks of x @ w.T, added in fp32 in rank order
    (the same bits on every run). Each rank's partial sum is rounded to the dtype before
    it travels; in float16 it must be within +-65504. partials="float32" keeps partial
    sums in fp32: twice the bytes travel, and w must be [N, K]. M is a multiple of the
    world size; on GPUs K and N are multiples of 8. Arrays: NumPy on the CPU backend;
    CuPy, torch, DLPack or `__cuda_array_interface__` on GPUs, contiguous, not copied.
    Raises ArgumentError on every rank if any rank's arguments do not fit or the ranks'
    shapes differ.
    """

    graph_function = staticmethod(matmul_reduce_scatter_graph)

    def __init__(
        self,
        *,
        dtype: str = "bfloat16",
        w_layout: str = "nk",
        partials: str | None = None,
        world: World | None = None,
        schedule: str = "static",
        trace: bool | None = None,
        options: Mapping[str, Any] | None = None,
    ):
        if partials is not None:
            world = given_world(world)
            known = {"partials": (partials, ("float32",))}
            refuse_unknown(world, type(self).__name__, **known)
            self.graph_function = float_partials_graph
        self.partials = partials
        super().__init__(
            dtype=dtype,
            w_layout=w_layout,
            world=world,
            schedule=schedule,
            trace=trace,
            options=options,
        )

    def _output_shape(self, *shapes: Sequence[int]) -> tuple[int, ...]:
        x, w = shapes
        return x[0] // self.world.size, self._columns(w)

    def _check(self, inputs: Sequence[Array]) -> None:
        super()._check(inputs)
        m, world = inputs[0].shape[0], self.world.size
        if m % world:
            raise self.misfit(f"M a multiple of {world}", f"M = {m}")

    def _tensors(self, inputs: Sequence[Array], y: Array) -> Fitted:
        x, w = inputs
        world, (m, k), n = self.world.size, x.shape, self._columns(w.shape)
        dims = {"rows": m // world, "n": n, "k": k}
        if self.partials:
            return {"x": x, "w": w, "y": y}, dims
        return {"x": x.reshape((world, m // world, k)), "w": w, "y": y}, dims
