"""AllGather + GEMM: y = (all ranks' rows of x, gathered) @ w.T."""

from __future__ import annotations

from collections.abc import Sequence

from etc_dist.functions.push_rows import PACKET_BYTES
from etc_dist.functions.scaled_weights import weight_input
from etc_dist.functions.tile_shape import TileShape
from etc_dist.ir import (
    EventTensor,
    Expr,
    Graph,
    Tensor,
    ceildiv,
    graph_function,
    maximum,
    minimum,
)
from etc_dist.ops.few_rows import gather_rows, with_few_rows
from etc_dist.ops.host_rows import Packets, pass_on_rows, send_rows
from etc_dist.ops.multiply import Matrix, RowEvents, TiledMatmul, tiles_of_dims
from etc_dist.ops.near_ranks import near_rank
from etc_dist.ops.operation import Candidate, WeightOperation
from etc_dist.ops.quantized_rows import (
    Rows,
    gathered_tensors,
    push_of,
    row_tensors,
    rows_for,
)
from etc_dist.ops.rank_tiles import RankTiles, rank_tiles_candidate
from etc_dist.ops.tile_model import FAMILY, FLOAT8_RATE
from etc_dist.ops.tile_order import shards_in_turn

PUSH_BYTES_PER_NS = 250
"""The limit of the push rate: faster stores delay the loads of the tensor lane."""
NEED_FLOPS_PER_NS = 740_000
"""A rank's GEMM rate, which determines how fast it needs its peers' rows. Of float8
activations, it is FLOAT8_RATE times this."""
PUSH_LEAD = 2.2
"""The push rate relative to the rate of need: measured best, with earlier tiles."""


@graph_function
def all_gather_matmul_graph(
    g: Graph,
    *,
    dtype: str = "bfloat16",
    w_layout: str = "nk",
    shapes: Sequence[TileShape] = FAMILY,
    packet_bytes: int = PACKET_BYTES,
) -> None:
    """x [rows, k] on each rank, w [n, k] or [k, n] -> y [world, rows, n].

    Every rank pushes its rows to all peers in packets, at a limited rate, first to the
    peer that needs them first. Meanwhile its tensor lane multiplies its own rows, then
    those of the next rank, and so on, each tile after all packets of its rows. Over
    several hosts, rows of near ranks come first, and a rank passes on its partners'.
    With a layout of float8 activations, own rows are quantized first, and codes and
    scales are pushed. See `tiles_of_dims` and `TiledMatmul` for the dims that select
    tiles."""
    rows, n, k = g.dims("rows n k")
    x = g.input("x", (rows, k), dtype)
    w = weight_input(g, "w", w_layout, n, k, dtype)
    y = g.output("y", (g.world_size, rows, n), dtype)
    tiles = tiles_of_dims(g, "", shapes, rows, w_layout)
    own_rows, own_events = rows_for(g, "", tiles, x, n, None)
    own_x, own_y = Matrix.of(own_rows), Matrix(y, (g.rank,))
    matmul = RankTiles(g, "", tiles, dtype, own_x, [w], own_y)
    add_gathered_matmul(g, matmul, own_rows, y, n, packet_bytes, waits=own_events)


def add_gathered_matmul(
    g: Graph,
    matmul: RankTiles,
    x: Rows,
    y: Tensor,
    n: Expr,
    packet_bytes: int,
    *,
    waits: RowEvents | None = None,
    complete: RowEvents | None = None,
) -> None:
    """Add `matmul` of this rank's rows x [rows, k], and of those of its peers, into y
    [world, rows, columns]. n: the rows of all weights, from which the pace of the
    transfers follows. waits: the events of blocks of x, of `matmul.height` rows.
    complete: the events [world, blocks] of blocks of rows of y."""
    world = g.world_size
    if world == 1:
        matmul.add(waits)
        return
    down, across, height = matmul.down, matmul.across, matmul.height
    group = matmul.group
    all_x, packet_events = push_packets(g, x, down, n, height, packet_bytes, waits)

    def add_whole_tiles() -> None:
        matmul.add_whole_tiles(waits)
        p, *_ = grid = matmul.grid(world - 1, across)
        source = source_of(g, p)
        matmul.multiply(
            "multiply_peer",
            grid,
            (Matrix.of(all_x, (source,)), Matrix(y, (source,))),
            waits=RowEvents(packet_events, height, (source,)),
            notifies=None if complete is None else complete.of(source),
            order=lambda t: shards_in_turn(t, down, across, group),
        )

    matmul.add(waits, add_whole_tiles=add_whole_tiles)


def source_of(g: Graph, p: Expr) -> Expr:
    """The rank whose rows are multiplied p-th after this rank's own: the next one on
    this host, and so on, then those of the host before, this rank's partner first."""
    world, near = g.world_size, g.local_size
    if near == world:
        return (g.rank + 1 + p) % world
    local = (g.rank + 1 + p) % near
    return near_rank(g, local + world - (p + 1) // near * near) % world


def push_packets(
    g: Graph,
    x: Rows,
    blocks: Expr,
    n: Expr,
    size: Expr,
    packet_bytes: int,
    waits: RowEvents | None,
) -> tuple[Rows, EventTensor]:
    """Add the gathering of x [rows, k]: every rank pushes its rows to all peers. Over
    several hosts, it sends them once to each host, where its partner passes them on.

    Returns the gathered rows [world, rows, k] and their events [world, blocks], each
    complete when all packets of a block of `size` rows have arrived. A packet ends at
    the end of its block, as an event counts whole packets. The pace follows
    from n, the columns of the GEMM that follows. waits: the events of blocks of x."""
    world, near, tensors = g.world_size, g.local_size, row_tensors(x)
    (rows, k), itemsize = tensors[0].shape, tensors[0].itemsize
    row_bytes = k * itemsize
    packet_rows = g.let(
        "packet_rows", maximum(1, minimum(size, packet_bytes // row_bytes))
    )
    num_packets = g.let("packets", ceildiv(size, packet_rows))
    all_x = gathered_tensors(g, "gathered", (world, rows), x)
    shape = Packets(size, blocks, packet_rows, num_packets)
    if near == world:
        packet_events = g.events(
            "arrived", (world, blocks), expects=num_packets, cross_rank=True
        )
    else:
        packet_events = send_rows(g, x, all_x, shape, waits)

    num_sent_bytes = packet_rows * row_bytes
    flops_per_ns = NEED_FLOPS_PER_NS * (FLOAT8_RATE / 2 if len(tensors) > 1 else 1)
    p, b, q = grid = g.grid(p=near - 1, b=blocks, q=num_packets)
    to = near_rank(g, (g.rank + (near - 1) - p) % near)
    g.call(
        push_of(x),
        grid,
        reads=[tensor[shape.rows(b, q), :] for tensor in tensors],
        writes=[
            tensor.on(to)[g.rank, shape.rows(b, q), :] for tensor in row_tensors(all_x)
        ],
        waits=[] if waits is None else [waits.at(b * size)],
        notifies=[packet_events.on(to)[g.rank, b]],
        pace=maximum(
            num_sent_bytes * n // int(flops_per_ns * PUSH_LEAD),
            num_sent_bytes // PUSH_BYTES_PER_NS,
        ),
    )
    if near < world:
        pass_on_rows(g, all_x, packet_events, shape)
    return all_x, packet_events


@graph_function
def gathered_matmul_graph(
    g: Graph,
    *,
    dtype: str = "bfloat16",
    w_layout: str = "nk",
    shapes: Sequence[TileShape] = FAMILY,
) -> None:
    """x [rows, k] on each rank, w [n, k] or [k, n] -> y [world * rows, n], for few
    rows: those of a tile are gathered before they are multiplied. Dims select the
    tiles: see `tiles_of_dims` and `TiledMatmul`."""
    rows, n, k = g.dims("rows n k")
    tokens = g.let("tokens", g.world_size * rows)
    x = g.input("x", (rows, k), dtype)
    w = weight_input(g, "w", w_layout, n, k, dtype)
    y = g.output("y", (tokens, n), dtype)
    tiles = tiles_of_dims(g, "", shapes, tokens, w_layout)
    own_rows, own_events = rows_for(g, "", tiles, x, n, None)
    all_x, x_events = gather_rows(g, own_rows, tokens, tiles.rows, own_events)
    TiledMatmul(g, "", tiles, dtype, all_x, [w], y).add(x_events)


class AllGatherMatmul(WeightOperation):
    """AllGather + GEMM as a reusable object.

    op(x, w, out=None, stream=None): x [M / world_size, K] and w [N, K] on every rank;
    returns out [M, N]: the rows of all ranks, in rank order, times this rank's w.T. w
    may be a transposed view, or scaled, as for `Matmul`. On GPUs K and N are multiples
    of 8. Arrays, dtypes, options and errors as for `MatmulReduceScatter`. With
    deterministic="batch" a row also has the same bits for any number of ranks and
    hosts.

    activations: as for `Matmul`. With "float8" each rank quantizes its own rows once;
    codes and scales are sent to the other ranks, 33/64 of the bytes.
    """

    inputs = "x [rows, k]", "w [n, k]"
    output = "out [ranks * rows, n]"

    def candidates(self) -> list[Candidate]:
        """Internal: rows that are gathered first, or multiplied as they arrive."""
        many = rank_tiles_candidate(
            all_gather_matmul_graph,
            self.world,
            self.deterministic,
            self.sizes,
            shapes=self.family,
        )
        return with_few_rows(
            gathered_matmul_graph,
            many,
            self.world,
            self.deterministic,
            shapes=self.family,
        )
