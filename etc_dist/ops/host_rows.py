"""The gathering of rows over hosts: each row is sent once to each host, and passed on
there."""

from __future__ import annotations

from dataclasses import dataclass

from etc_dist.functions.push_far import push_far
from etc_dist.ir import (
    EventTensor,
    Expr,
    Graph,
    ceildiv,
    equal,
    maximum,
    minimum,
    select,
    span,
)
from etc_dist.ir.tensor import Tile
from etc_dist.ops.multiply import RowEvents
from etc_dist.ops.near_ranks import near_rank
from etc_dist.ops.quantized_rows import Rows, push_of, row_tensors

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


def send_rows(
    g: Graph, x: Rows, all_x: Rows, shape: Packets, waits: RowEvents | None
) -> EventTensor:
    """Add the sending of x [rows, k] to this rank's partners, into their `all_x`
    [world, rows, k], from where they pass it on. waits: the events of blocks of x.

    Returns the events [world, blocks] of the blocks of `all_x`, for the packets of
    near ranks and the messages of partners: of codes and of scales, if x has them."""
    own_tensors, all_tensors = row_tensors(x), row_tensors(all_x)
    near, size, blocks = g.local_size, shape.size, shape.blocks
    message_rows = g.let("message_rows", shape.packet_rows * PACKETS_OF_MESSAGE)
    num_messages = g.let(
        "messages", ceildiv(minimum(size, own_tensors[0].shape[0]), message_rows)
    )
    packet_events = g.events(
        "arrived",
        (g.world_size, blocks),
        expects=lambda source, _: select(
            equal(source % near, g.rank % near),
            num_messages * len(all_tensors),
            shape.packets,
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
        push_of(x),
        grid,
        name="stage_rows",
        reads=[tensor[packet, :] for tensor in own_tensors],
        writes=[tensor[g.rank, packet, :] for tensor in all_tensors],
        waits=[] if waits is None else [waits.at(b * size)],
        notifies=[staged[b, f]],
    )
    s, b, f = grid = g.grid(s=g.world_size // near - 1, b=blocks, f=num_messages)
    partner = (g.rank + (s + 1) * near) % g.world_size
    message = span(
        b * size + f * message_rows, minimum(message_rows, size - f * message_rows)
    )
    # Scales first: they are few bytes, and codes are not multiplied without them.
    names = ("send_rows", "send_scales")
    for tensor, name in reversed([*zip(all_tensors, names, strict=False)]):
        g.call(
            push_far(),
            grid,
            name=name,
            reads=[tensor[g.rank, message, :]],
            writes=[tensor.on(partner)[g.rank, message, :]],
            waits=[staged[b, f]],
            notifies=[packet_events.on(partner)[g.rank, b]],
        )
    return packet_events


def pass_on_rows(
    g: Graph, all_x: Rows, packet_events: EventTensor, shape: Packets
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
        push_of(all_x),
        grid,
        name="pass_on_rows",
        reads=[tensor[source, packet, :] for tensor in row_tensors(all_x)],
        writes=[tensor.on(to)[source, packet, :] for tensor in row_tensors(all_x)],
        waits=[packet_events[source, b]],
        notifies=[packet_events.on(to)[source, b]],
    )
