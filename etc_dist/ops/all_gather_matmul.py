"""AllGather + GEMM: y = (all ranks' rows of x, gathered) @ w.T."""

from __future__ import annotations

from collections.abc import Sequence

from etc_dist.functions.matmul import TILE, matmul_store
from etc_dist.functions.push_rows import PACKET_BYTES, push_rows
from etc_dist.ir import (
    EventTensor,
    Expr,
    Graph,
    Tensor,
    ceildiv,
    graph_function,
    maximum,
    minimum,
    span,
    tile,
)
from etc_dist.ops.operation import Fitted
from etc_dist.ops.order import grouped_rows, shards_in_turn
from etc_dist.ops.product import ProductOperation
from etc_dist.runtime.arrays import Array

ROW_GROUP = 8
"""Row blocks whose tiles are taken together, for reuse in L2."""
PUSH_BYTES_PER_NS = 250
"""The fastest push: above it, stores crowd out the tensor lane's own loads."""
NEED_FLOPS_PER_NS = 740_000
"""A rank's matmul rate, from which follows how fast it needs its peers' rows."""
PUSH_LEAD = 2.2
"""The push runs this much faster than the rows are needed: measured best."""


@graph_function
def all_gather_matmul_graph(
    g: Graph,
    *,
    dtype: str = "bfloat16",
    w_layout: str = "nk",
    tile_size: int = TILE,
    packet_bytes: int = PACKET_BYTES,
) -> None:
    """x [rows, k] on each rank, w [n, k] or [k, n] -> y [world, rows, n].

    Every rank pushes its rows to all peers in packets, paced, first to the peer that
    needs them first, while its tensor lane multiplies its own rows, then those of the
    next rank, and so on, each row block as soon as all its packets have come."""
    rows, n, k = g.dims("rows n k")
    world, size = g.world_size, tile_size
    blocks = g.let("blocks", ceildiv(rows, size))
    columns = g.let("columns", ceildiv(n, size))
    x = g.input("x", (rows, k), dtype)
    w = g.input("w", (n, k) if w_layout == "nk" else (k, n), dtype)
    y = g.output("y", (world, rows, n), dtype)
    multiply = matmul_store(w_layout, dtype)

    i, j = grid = g.grid(i=blocks, j=columns)
    w_tile = w[tile(j, size), :] if w_layout == "nk" else w[:, tile(j, size)]
    g.call(
        multiply,
        grid,
        name="matmul_own",
        reads=[x[tile(i, size), :], w_tile],
        writes=[y[g.rank, tile(i, size), tile(j, size)]],
        order=lambda t: grouped_rows(t, blocks, columns, ROW_GROUP),
    )
    if world == 1:
        return
    gathered, arrived = push_packets(g, x, blocks, n, size, packet_bytes)
    p, i, j = grid = g.grid(p=world - 1, i=blocks, j=columns)
    source = (g.rank + 1 + p) % world
    w_tile = w[tile(j, size), :] if w_layout == "nk" else w[:, tile(j, size)]
    g.call(
        multiply,
        grid,
        name="matmul_peer",
        reads=[gathered[source, tile(i, size), :], w_tile],
        writes=[y[source, tile(i, size), tile(j, size)]],
        waits=[arrived[source, i]],
        order=lambda t: shards_in_turn(t, blocks, columns, ROW_GROUP),
    )


def push_packets(
    g: Graph, x: Tensor, blocks: Expr, n: Expr, size: int, packet_bytes: int
) -> tuple[Tensor, EventTensor]:
    """Add the gathering of x [rows, k]: every rank pushes its rows to all peers.

    Returns the gathered rows [world, rows, k] and their events [world, blocks], met
    when all packets of a block of `size` rows have come; one's own rows stay in x. The
    pace follows from the n columns that the rows will be multiplied with."""
    world, (rows, k) = g.world_size, x.shape
    row_bytes = k * x.itemsize
    packet_rows = g.let(
        "packet_rows", maximum(1, minimum(size, packet_bytes // row_bytes))
    )
    packets = g.let("packets", ceildiv(size, packet_rows))
    gathered = g.symmetric("gathered", (world, rows, k), x.dtype)
    arrived = g.events("arrived", (world, blocks), expects=packets, cross_rank=True)

    sent = packet_rows * row_bytes
    p, b, q = grid = g.grid(p=world - 1, b=blocks, q=packets)
    to = (g.rank + (world - 1) - p) % world
    # A packet's rows end where its block ends: an event counts whole packets.
    first = b * size + q * packet_rows
    packet = span(first, minimum(packet_rows, size - q * packet_rows))
    g.call(
        push_rows(),
        grid,
        reads=[x[packet, :]],
        writes=[gathered.on(to)[g.rank, packet, :]],
        notifies=[arrived.on(to)[g.rank, b]],
        pace=maximum(
            sent * n // int(NEED_FLOPS_PER_NS * PUSH_LEAD), sent // PUSH_BYTES_PER_NS
        ),
    )
    return gathered, arrived


class AllGatherMatmul(ProductOperation):
    """AllGather + GEMM as a reusable object.

    op(x, w, out=None, stream=None): x [M / world_size, K] and w [N, K] (or [K, N]) on
    every rank; returns out [M, N]: the rows of all ranks, in rank order, times this
    rank's w.T. On GPUs K and N are multiples of 8. Arrays and errors as in
    MatmulReduceScatter.
    """

    graph_function = staticmethod(all_gather_matmul_graph)

    def _output_shape(self, *shapes: Sequence[int]) -> tuple[int, ...]:
        x, w = shapes
        return x[0] * self.world.size, self._columns(w)

    def _tensors(self, inputs: Sequence[Array], y: Array) -> Fitted:
        x, w = inputs
        (rows, k), n = x.shape, self._columns(w.shape)
        stacked = y.reshape((self.world.size, rows, n))
        return {"x": x, "w": w, "y": stacked}, {"rows": rows, "n": n, "k": k}
