"""Tiles of partial sums: each is sent to a slot of its owner, which adds the slots."""

from __future__ import annotations

from dataclasses import dataclass

from etc_dist.functions.sum_slots import sum_slots
from etc_dist.ir import (
    EventRef,
    EventTensor,
    Expr,
    Graph,
    Region,
    Tensor,
    span,
    tile,
)
from etc_dist.ir.call import Grid
from etc_dist.ir.expr import Const
from etc_dist.ir.order import Order
from etc_dist.ops.host_sums import add_host_sums, host_after, near_owners, near_rank
from etc_dist.ops.order import pieces_by_column, rotated_owners, split_tile


@dataclass(frozen=True)
class Slots:
    """The slots of tiles, and the call that fills them.

    On one host a slot is on the tile's owner. Over several hosts it is on the near rank
    with the owner's local rank, which sums the parts of this host first."""

    tensor: Tensor
    events: EventTensor
    """An event for each tile; the first axis is that of hosts, if there are several."""
    grid: Grid
    order: Order
    owner: Expr
    """The rank that owns the tile of a task, which has the coordinates i and j."""
    slot: Region
    ready: EventRef


def make_slots(
    g: Graph, blocks: Expr, columns: Expr, size: int, dtype: str, group: int
) -> Slots:
    """Slots for blocks x columns tiles of `size` rows and columns on each rank, which
    are computed `group` columns at a time."""
    world, near = g.world_size, g.local_size
    slots = g.symmetric("slots", (world, blocks, columns, size, size), dtype)
    if near == world:
        ready = g.events("ready", (blocks, columns), expects=world, cross_rank=True)
        d, i, j = grid = g.grid(d=world, i=blocks, j=columns)
        return Slots(
            slots,
            ready,
            grid,
            order=lambda t: rotated_owners(t, world, blocks, columns, group),
            owner=d,
            slot=slots.on(d)[g.rank, i, j, :, :],
            ready=ready.on(d)[i, j],
        )
    of_hosts = (world // near, blocks, columns)
    ready = g.events("ready", of_hosts, expects=near, cross_rank=True)
    s, o, i, j = grid = g.grid(s=of_hosts[0], o=near, i=blocks, j=columns)
    at = near_rank(g, o)
    return Slots(
        slots,
        ready,
        grid,
        order=lambda t: near_owners(g, t, blocks, columns, group),
        owner=host_after(g, s) * near + o,
        slot=slots.on(at)[s * near + g.rank % near, i, j, :, :],
        ready=ready.on(at)[s, i, j],
    )


def add_sum_slots(g: Graph, slots: Slots, y: Tensor, piece: tuple[int, int]) -> None:
    """Add the reduction: y [rows, n] = the sum of the slots over ranks, in pieces. A
    piece is summed once its tile has come from all ranks."""
    _, blocks, columns, extent, _ = slots.tensor.shape
    assert isinstance(extent, Const)  # tiles have a fixed size
    size, (piece_rows, piece_columns) = extent.value, piece
    down, across = split_tile(g.name, size, piece)
    near = g.local_size
    if near < g.world_size:

        def of_host(s: Expr | int, r: Expr, j: Expr, q: Expr) -> Region:
            rows, width = tile(r % down, piece_rows), tile(q, piece_columns)
            return slots.tensor[span(s * near, near), r // down, j, rows, width]

        add_host_sums(
            g,
            sum_slots(y.dtype, near),
            of_host,
            slots.events,
            y,
            tile_shape=(size, size),
            piece=piece,
            partials=y.dtype,
        )
        return
    i, j, p, q = grid = g.grid(i=blocks, j=columns, p=down, q=across)
    g.call(
        sum_slots(y.dtype),
        grid,
        reads=[slots.tensor[:, i, j, tile(p, piece_rows), tile(q, piece_columns)]],
        writes=[
            y[
                span(i * size + p * piece_rows, piece_rows),
                span(j * size + q * piece_columns, piece_columns),
            ]
        ],
        waits=[slots.events[i, j]],
        order=lambda t: pieces_by_column(t, blocks, down, across),
    )
