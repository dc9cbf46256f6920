"""Steps of sums over ranks that every rank gets: the parts of an all-reduce.

All arrays are flat, in vectors of eight elements. A piece is what one task transfers or
adds; each has an event. What is written over x comes after all that this rank sends of
it, since a rank also sends its part to itself, by the same task or to the same sum."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from etc_dist.functions.flags import add_flagged, push_flagged
from etc_dist.functions.push_far import push_far
from etc_dist.functions.share_sum import share_sum
from etc_dist.ir import (
    EventRef,
    EventTensor,
    Expr,
    Graph,
    Region,
    Tensor,
    ceildiv,
    maximum,
    minimum,
    span,
    tile,
)
from etc_dist.ir.call import Grid
from etc_dist.ir.tensor import Tile
from etc_dist.ops.near_ranks import every_rank, local_rank, near_rank, peers_of

Index = tuple[Any, ...]
"""Of a region, for the last axes of a tensor."""


@dataclass(frozen=True)
class Shares:
    """`total` elements, divided over the ranks of a host into shares of `size`
    elements, the last ones smaller or empty, and each share into `count` pieces."""

    total: Expr
    size: Expr
    piece: Expr
    count: Expr

    @classmethod
    def of(cls, g: Graph, total: Expr, piece: Expr, is_used: Expr | int) -> Shares:
        """Those of `total` vectors, in pieces of `piece` vectors. is_used: 1, or 0:
        then there is nothing to do."""
        size = g.let("share", is_used * ceildiv(total, g.local_size))
        return cls(
            8 * total, 8 * size, 8 * piece, g.let("pieces", ceildiv(size, piece))
        )

    def place(self, owner: Expr, i: Expr) -> Tile:
        """Piece i of the share of local rank `owner`, in all elements."""
        return span(owner * self.size + i * self.piece, self._length(owner, i))

    def inside(self, owner: Expr, i: Expr) -> Tile:
        """The same in a share."""
        return span(i * self.piece, self._length(owner, i))

    def _length(self, owner: Expr, i: Expr) -> Expr:
        start = i * self.piece
        in_share = minimum(self.piece, self.size - start)
        return maximum(0, minimum(in_share, self.total - owner * self.size - start))


def add_flagged_sum(
    g: Graph, x: Tensor, y: Tensor, piece: Expr, num_tasks: Expr
) -> None:
    """Add an all-reduce of x [8 * total] into y by one exchange of flagged words: each
    rank stores its part on its peers, and adds all parts as they arrive. num_tasks: a
    multiple of the workers, so that a worker sends the piece that it writes over; or 0:
    then there is nothing to do."""
    (length,) = x.shape
    is_flagged = g.let("is_flagged", minimum(1, num_tasks))
    (i,) = grid = g.grid(i=num_tasks)
    start = i * (8 * piece)
    elements = span(start, maximum(0, minimum(8 * piece, length - start)))
    words, arrival_event = exchange_flagged(
        g, grid, x[elements], (elements,), (is_flagged * length,)
    )
    g.call(
        add_flagged(x.dtype),
        grid,
        reads=[x[elements], words[:, elements]],
        writes=[y[elements]],
        waits=[arrival_event],
    )


def exchange_flagged(
    g: Graph,
    grid: Grid,
    part: Region,
    place: Index,
    shape: Index,
    *,
    is_row: bool = False,
) -> tuple[Tensor, EventRef]:
    """Each task of `grid`, which has one axis, stores a part of x on the peers: at
    `place` of this rank's flagged words of `shape`. Returns the words [world, *shape],
    and the event of the arrival of those of a task. is_row: as for `push_flagged`."""
    dtype, peers = part.tensor.dtype, peers_of(g)
    words = g.flagged("words", (g.world_size, *shape), dtype)
    (axis,), (i,) = grid.axes, grid
    word_events = g.events(
        "words_arrived",
        (axis.extent,),
        expects=g.world_size - 1,
        cross_rank=True,
        carried_by=words,
    )
    g.call(
        push_flagged(dtype, len(peers), is_row=is_row),
        grid,
        reads=[part],
        writes=[words.on(peer)[g.rank, *place] for peer in peers],
        notifies=[word_events.on(peer)[i] for peer in peers],
    )
    return words, word_events[i]


def add_one_shot(
    g: Graph, x: Tensor, y: Tensor, piece: Expr, is_used: Expr | int
) -> None:
    """Add an all-reduce of x [8 * total] into y by one exchange: each rank stores its
    part on all ranks, and adds all parts. is_used: as for `Shares.of`."""
    (length,) = x.shape
    slots = g.symmetric("slots", (g.world_size, is_used * length), x.dtype)
    count = g.let("slot_pieces", is_used * ceildiv(length, 8 * piece))
    slot_events = g.events("arrived", (count,), expects=g.world_size, cross_rank=True)
    (i,) = grid = g.grid(i=count)
    elements, ranks = tile(i, 8 * piece), every_rank(g)
    g.call(
        share_sum(x.dtype, 1, g.world_size),
        grid,
        name="push_parts",
        reads=[x[elements]],
        writes=[slots.on(rank)[g.rank, elements] for rank in ranks],
        notifies=[slot_events.on(rank)[i] for rank in ranks],
    )
    g.call(
        share_sum(x.dtype, g.world_size),
        grid,
        name="add_slots",
        reads=[slots[:, elements]],
        writes=[y[elements]],
        waits=[slot_events[i]],
    )


def add_two_shot(g: Graph, x: Tensor, y: Tensor, shares: Shares) -> None:
    """Add an all-reduce of x [8 * total] into y by two exchanges: each rank of a host
    adds a share of the elements, and stores the sum on all ranks of the host. Over
    several hosts the sums of hosts, in fp32, are added in between."""
    parts, scattered = _scatter(g, x, shares)
    sums, ready = parts, scattered
    dtype = x.dtype
    if g.local_size < g.world_size:
        dtype = "float32"

        def own(i: Expr, *_: Expr) -> Index:
            return (shares.inside(local_rank(g), i),)

        units = shares.count, own
        sums, ready = exchange_hosts(g, parts, scattered, units, (1, own))
    _gather(g, sums, ready, y, shares, dtype)


def whole(parts: Tensor, *index: Any) -> Region:
    """An index of all parts; without their axis if there is one."""
    return parts[:, *index] if sums_of(parts) > 1 else parts[0, *index]


def _scatter(g: Graph, x: Tensor, shares: Shares) -> tuple[Tensor, EventTensor]:
    """Each rank of the host gets the parts [near, share] of its share."""
    near = g.local_size
    parts = g.symmetric("parts", (near, shares.size), x.dtype)
    scattered = g.events("scattered", (shares.count,), expects=near, cross_rank=True)
    i, p = grid = g.grid(i=shares.count, p=near)
    owner = (g.rank + 1 + p) % near
    to = near_rank(g, owner)
    g.call(
        share_sum(x.dtype, 1),
        grid,
        name="scatter_parts",
        reads=[x[shares.place(owner, i)]],
        writes=[parts.on(to)[local_rank(g), shares.inside(owner, i)]],
        notifies=[scattered.on(to)[i]],
    )
    return parts, scattered


def exchange_hosts(
    g: Graph,
    parts: Tensor,
    scattered: EventTensor,
    units: tuple[Expr, Callable[[Expr], Index]],
    pieces: tuple[Expr | int, Callable[[Expr, Expr], Index]],
) -> tuple[Tensor, EventTensor]:
    """Add the sums of the parts [near, ...] of this host, in fp32; each rank gets those
    [hosts, ...] of all hosts for its share, with an event for each unit.

    units: their number on this rank, and the index of one in its share, which is sent
    by one message. pieces: those of a unit, and the index of one, which a task adds."""
    near, hosts = g.local_size, g.world_size // g.local_size
    own_host = g.rank // near
    (num_units, unit), (num_pieces, piece) = units, pieces
    sums = g.symmetric("host_sums", (hosts, *parts.shape[1:]), "float32")
    shape = scattered.shape
    summed = g.events("summed", shape, expects=num_pieces)
    expects = hosts - 1 + num_pieces
    complete = g.events("complete", shape, expects=expects, cross_rank=True)
    i, c = grid = g.grid(i=num_units, c=num_pieces)
    g.call(
        share_sum(parts.dtype, near, result="float32"),
        grid,
        name="add_near",
        reads=[whole(parts, *piece(i, c))],
        writes=[sums[own_host, *piece(i, c)]],
        waits=[scattered[i]],
        notifies=[summed[i], complete[i]],
    )
    i, s = grid = g.grid(i=num_units, s=hosts - 1)
    partner = (g.rank + (s + 1) * near) % g.world_size
    g.call(
        push_far(),
        grid,
        name="send_sums",
        reads=[sums[own_host, *unit(i)]],
        writes=[sums.on(partner)[own_host, *unit(i)]],
        waits=[summed[i]],
        notifies=[complete.on(partner)[i]],
    )
    return sums, complete


def _gather(
    g: Graph,
    sums: Tensor,
    ready: EventTensor,
    y: Tensor,
    shares: Shares,
    dtype: str,
) -> None:
    """Add the sums [n, share] of this rank's share; all ranks of the host get them."""
    near, local = g.local_size, local_rank(g)
    peers = peers_of(g)
    (count,) = ready.shape
    all_pieces = piece_events = None
    if peers:
        all_pieces = g.symmetric("gathered", (near, shares.size), y.dtype)
        piece_events = g.events(
            "gathered_piece", (near, count), expects=1, cross_rank=True
        )
    (i,) = grid = g.grid(i=count)
    own_piece = shares.inside(local, i)
    copies = (
        [all_pieces.on(peer)[local, own_piece] for peer in peers] if all_pieces else []
    )
    g.call(
        share_sum(dtype, sums_of(sums), 1 + len(peers), result=y.dtype),
        grid,
        name="add_share",
        reads=[whole(sums, own_piece)],
        writes=[y[shares.place(local, i)], *copies],
        waits=[ready[i]],
        notifies=[piece_events.on(peer)[local, i] for peer in peers]
        if piece_events
        else [],
    )
    if all_pieces is None or piece_events is None:
        return
    i, p = grid = g.grid(i=count, p=near - 1)
    owner = (g.rank + 1 + p) % near
    g.call(
        share_sum(y.dtype, 1),
        grid,
        name="copy_share",
        reads=[all_pieces[owner, shares.inside(owner, i)]],
        writes=[y[shares.place(owner, i)]],
        waits=[piece_events[owner, i]],
    )


def sums_of(parts: Tensor) -> int:
    """The number of parts, a constant."""
    return int(parts.shape[0].evaluate({}))
