"""Sums over the ranks of a host of a matmul's result, which every rank gets: of tiles
that are sent while others are computed, or that their epilogues store on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from etc_dist.functions.push_tile import push_tile
from etc_dist.functions.sum_ranks import sum_ranks
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
from etc_dist.ir.expr import wrap
from etc_dist.ir.order import Order
from etc_dist.ir.tensor import Tile
from etc_dist.ops.multiply import SEGMENT, RowEvents, Stored
from etc_dist.ops.near_ranks import TilePlaces
from etc_dist.ops.rank_tiles import RankTiles
from etc_dist.ops.tile_order import ROW_GROUP, grouped_rows


@dataclass(frozen=True)
class TileSums:
    """y [rows, n]: the sums over ranks of the result of `matmul`, on one host. Each
    rank has its result in its place of `slots` [world, rows, n] on all ranks, and adds
    all places, strip by strip. The first strips are computed first, and are sent while
    other tiles are computed; these are stored on all ranks.

    elements: that a task sends, and adds. is_used: 1, or 0: then there is nothing to
    send or add. early_strips: the strips that are sent, if they have no tiles of
    split-K. waits: the events of blocks of rows of x."""

    g: Graph
    matmul: RankTiles
    slots: Tensor
    y: Tensor
    elements: tuple[Expr, Expr]
    is_used: Expr
    early_strips: Expr
    waits: RowEvents | None = None

    def add(self) -> RowEvents:
        """Add the tiles, and the sums. Returns the events of blocks of rows that are
        not used."""
        g, matmul, slot_events, strip = self.g, self.matmul, self._arrived, self._strip
        is_own, is_used = 1 - self.is_used, self.is_used
        of_strips = select(equal(is_used, 1), strip, matmul.across)
        num_strips = is_own + self._num_early
        produced = matmul.complete_strips(
            "produced", g.let("produced_strip", of_strips), num_strips=num_strips
        )
        places = TilePlaces(g, self.slots, self.slots.shape[1])
        events = RowEvents(slot_events, matmul.height, (), strip, places.peers)
        to = Stored(places, places.epilogue, events)

        def add_whole_tiles() -> None:
            early = g.let("early_columns", self._num_early * strip)
            columns = g.let("own_columns", is_own * matmul.whole + early)
            matmul.add_whole_tiles(self.waits, columns=columns)
            matmul.add_whole_tiles(
                self.waits,
                columns=g.let("stored_columns", is_used * (matmul.whole - early)),
                first_column=early,
                call="tile_on_ranks",
                axes="stored_",
                to=to,
            )

        def add_sums() -> None:
            matmul.add_sums(columns=g.let("own_sums", is_own * matmul.split))
            columns = g.let("stored_sums", is_used * matmul.split)
            call = "sum_on_ranks"
            matmul.add_sums(columns=columns, call=call, axes="stored_", to=to)

        matmul.add(self.waits, add_whole_tiles, add_sums)
        self._add_sent(produced)
        self._add_sums(produced)
        return produced

    @cached_property
    def _strip(self) -> Expr:
        """In columns of tiles."""
        return self.g.let("stored_strip", strip_of(self.matmul.columns))

    @cached_property
    def _num_early(self) -> Expr:
        most = minimum(self.early_strips, self.matmul.whole // self._strip)
        return self.g.let("num_early_strips", self.is_used * most)

    @cached_property
    def _width(self) -> Expr:
        """Columns of a strip."""
        columns = self.matmul.columns * self._strip
        return self.g.let("stored_width", minimum(self.y.shape[1], columns))

    @cached_property
    def _sent_pieces(self) -> Pieces:
        height, elements = self.matmul.height, self.elements[0]
        return Pieces(self.g, "sent_piece", height, self._width, elements)

    @cached_property
    def _arrived(self) -> EventTensor:
        """The events of a row of tiles and a strip of them."""
        g, matmul, strip = self.g, self.matmul, self._strip
        num_sent = (g.world_size - 1) * self._sent_pieces.count

        def tasks(block: Expr, strip_idx: Expr) -> Expr:
            num_tiles, num_more = matmul.last_of_strip(strip, strip_idx)
            num_stored = g.world_size * (num_tiles + num_more)
            return select(strip_idx < self._num_early, num_sent, num_stored)

        num_strips = g.let("stored_strips", ceildiv(matmul.across, strip))
        shape = self.is_used * matmul.down, num_strips
        return g.events("tiles_arrived", shape, expects=tasks, cross_rank=True)

    def _add_sent(self, produced: RowEvents) -> None:
        """The early strips are sent."""
        g, pieces, num_peers = self.g, self._sent_pieces, self.g.world_size - 1
        sizes = self.is_used * self.matmul.down, self._num_early
        order = self._in_order(sizes, (num_peers, pieces.down, pieces.across))
        axes = ("sent_block", "sent_strip", "peer", "sent_row", "sent_column")
        extents = *sizes, wrap(num_peers), pieces.down, pieces.across
        i, s, p, r, c = grid = g.grid(**dict(zip(axes, extents, strict=True)))
        to, piece = (g.rank + 1 + p) % g.world_size, pieces.place(i, s, r, c)
        g.call(
            push_tile(self.y.dtype),
            grid,
            name="send_tiles",
            reads=[self.slots[g.rank, *piece]],
            writes=[self.slots.on(to)[g.rank, *piece]],
            waits=[produced.events[0, i, s]],
            notifies=[self._arrived.on(to)[i, s]],
            order=order,
        )

    def _add_sums(self, produced: RowEvents) -> None:
        """All places are added."""
        g, slot_events, elements = self.g, self._arrived, self.elements[1]
        pieces = Pieces(g, "stored_piece", self.matmul.height, self._width, elements)
        order = self._in_order(slot_events.shape, (pieces.down, pieces.across))
        axes = ("arrived_block", "arrived_strip", "added_row", "added_column")
        extents = (*slot_events.shape, pieces.down, pieces.across)
        i, s, r, c = grid = g.grid(**dict(zip(axes, extents, strict=True)))
        piece = pieces.place(i, s, r, c)
        g.call(
            sum_ranks(self.y.dtype),
            grid,
            name="add_stored",
            reads=[self.slots[span(0, g.world_size), *piece]],
            writes=[self.y[piece]],
            waits=[
                slot_events[i, s],
                produced.events[0, i, s].when(s < self._num_early),
            ],
            order=order,
        )

    def _in_order(self, strips: Sequence[Expr], pieces: Sequence[Expr | int]) -> Order:
        """The order of the tiles, with the coordinates of pieces inside. strips: their
        numbers of blocks of rows and of columns."""
        (_, num_strips), down = strips, self.matmul.down
        sizes: list[Expr | int] = [1]
        for extent in reversed(pieces):
            sizes.insert(0, sizes[0] * extent)

        def order(t: Expr) -> tuple[Expr, ...]:
            strip_of_block = grouped_rows(t // sizes[0], down, num_strips, ROW_GROUP)
            inside = [t % n // m for n, m in pairwise(sizes)]
            return *strip_of_block, *inside

        return order


def strip_of(columns: Expr | int) -> Expr:
    """The tiles of `columns` columns side by side in a strip, which has at most SEGMENT
    columns: a warp adds so many of a row at once."""
    return maximum(1, SEGMENT // wrap(columns))


class Pieces:
    """The pieces of a strip of a block of rows, of about `elements` each: some rows, or
    some columns of a row. down, across, count: their number."""

    def __init__(
        self, g: Graph, name: str, height: Expr, width: Expr, elements: Expr
    ) -> None:
        self._height, self._width = height, width
        rows = minimum(height, maximum(1, elements // width))
        self._rows = g.let(f"{name}_rows", rows)
        self._columns = g.let(f"{name}_columns", minimum(width, elements))
        self.down = g.let(f"{name}_down", ceildiv(height, self._rows))
        self.across = g.let(f"{name}_across", ceildiv(width, self._columns))
        self.count = g.let(f"{name}s", self.down * self.across)

    def place(self, block: Expr, strip: Expr, r: Expr, c: Expr) -> tuple[Tile, Tile]:
        """The rows and columns of a piece."""
        row, column = r * self._rows, c * self._columns
        return (
            span(block * self._height + row, minimum(self._rows, self._height - row)),
            span(
                strip * self._width + column,
                minimum(self._columns, self._width - column),
            ),
        )
