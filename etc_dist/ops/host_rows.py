"""The gathering of rows over hosts: each row is sent once to each host, and passed on
there."""

from __future__ import annotations

from dataclasses import dataclass

from etc_dist.functions.push_far import push_far
from etc_dist.functions.push_rows import push_rows
from etc_dist.ir import (
    EventTensor,
    Expr,
    Graph,
    Tensor,
    ceildiv,
    equal,
    maximum,
    minimum,
    select,
    span,
)
from etc_dist.ir.tensor import Tile
from etc_dist.ops.near_ranks import near_rank

PACKETS_OF_MESSAGE = 4
"""Packets that are sent to another host by one message: fewer messages cost less, and
more of them arrive earlier."""


@dataclass(frozen=True)
class Packets:
    """Blocks of `size` rows, of `packets` packets each, of `packet_rows` rows: the last
    one of a block ends with it."""

    size: Expr
    blocks: Expr
    packet_rows: Expr
    packets: Expr

    def rows(self, b: Expr, q: Expr) -> Tile:
        """The q-th packet of block b."""
        start = q * self.packet_rows
        return span(b * self.size + start, minimum(self.packet_rows, self.size - start))


def send_rows(g: Graph, x: Tensor, all_x: Tensor, shape: Packets) -> EventTensor:
    """Add the sending of x [rows, k] to this rank's partners, into their `all_x`
    [world, rows, k], from where they pass it on.

    Returns the events [world, blocks] of the blocks of `all_x`, for the packets of
    near ranks and the messages of partners."""
    near, size, blocks = g.local_size, shape.size, shape.blocks
    message_rows = g.let("message_rows", shape.packet_rows * PACKETS_OF_MESSAGE)
    num_messages = g.let("messages", ceildiv(minimum(size, x.shape[0]), message_rows))
    packet_events = g.events(
        "arrived",
        (g.world_size, blocks),
        expects=lambda source, _: select(
            equal(source % near, g.rank % near), num_messages, shape.packets
        ),
        cross_rank=True,
    )
    staged = g.events("staged_rows", (blocks, num_messages), expects=PACKETS_OF_MESSAGE)

    b, f, c = grid = g.grid(b=blocks, f=num_messages, c=PACKETS_OF_MESSAGE)
    start = f * message_rows + c * shape.packet_rows
    packet = span(
        b * size + start, maximum(0, minimum(shape.packet_rows, size - start))
    )
    # Transfers between hosts read symmetric memory: this rank's place in `all_x`.
    g.call(
        push_rows(),
        grid,
        name="stage_rows",
        reads=[x[packet, :]],
        writes=[all_x[g.rank, packet, :]],
        notifies=[staged[b, f]],
    )
    s, b, f = grid = g.grid(s=g.world_size // near - 1, b=blocks, f=num_messages)
    partner = (g.rank + (s + 1) * near) % g.world_size
    message = span(
        b * size + f * message_rows, minimum(message_rows, size - f * message_rows)
    )
    g.call(
        push_far(),
        grid,
        name="send_rows",
        reads=[all_x[g.rank, message, :]],
        writes=[all_x.on(partner)[g.rank, message, :]],
        waits=[staged[b, f]],
        notifies=[packet_events.on(partner)[g.rank, b]],
    )
    return packet_events


def pass_on_rows(
    g: Graph, all_x: Tensor, packet_events: EventTensor, shape: Packets
) -> None:
    """Add the pushes of the partners' rows to near ranks, block by block."""
    world, near = g.world_size, g.local_size
    s, b, p, q = grid = g.grid(
        s=world // near - 1, b=shape.blocks, p=near - 1, q=shape.packets
    )
    source = (g.rank + world - (s + 1) * near) % world
    to = near_rank(g, (g.rank + 1 + p) % near)
    packet = shape.rows(b, q)
    g.call(
        push_rows(),
        grid,
        name="pass_on_rows",
        reads=[all_x[source, packet, :]],
        writes=[all_x.on(to)[source, packet, :]],
        waits=[packet_events[source, b]],
        notifies=[packet_events.on(to)[source, b]],
    )
