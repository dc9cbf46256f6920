"""Sums over the ranks of a host of a matmul's result, which every rank gets: of strips
of tiles, while the matmul runs, or of tiles that their epilogues store on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from etc_dist.functions.epilogue import store_on_ranks
from etc_dist.functions.push_tile import push_tile
from etc_dist.functions.sum_ranks import sum_ranks
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
    select,
    span,
)
from etc_dist.ir.tensor import Tile
from etc_dist.ops.multiply import RowEvents, Stored
from etc_dist.ops.order import ROW_GROUP
from etc_dist.ops.rank_tiles import RankTiles
from etc_dist.ops.sum_steps import every_rank

LAG = 64
"""The tiles that are sent before those of a turn are added: while the parts of peers
arrive, others are sent."""


@dataclass(frozen=True)
class TileSums:
    """y [rows, n]: the sums over ranks of the result of `matmul`, on one host. Each
    rank has its own one in its place of `slots` [world, rows, n], and sends it to all
    others, strip by strip.

    elements: that a task sends, or adds. produced: the events [1, blocks, strips] of
    tiles. used: 1, or 0: then there is nothing to do."""

    g: Graph
    matmul: RankTiles
    slots: Tensor
    y: Tensor
    elements: Expr
    produced: RowEvents
    used: Expr

    def add(self) -> None:
        """Add the transfers and the sums, in turns: a strip of a group of blocks of
        rows is sent, and one that was sent earlier is added."""
        g, matmul, world = self.g, self.matmul, self.g.world_size
        events, strip = self.produced.events, self.produced.strip
        assert strip is not None
        *_, blocks, strips = events.shape
        height, group = matmul.height, minimum(ROW_GROUP, blocks)
        width = g.let("strip_columns", minimum(self.y.shape[1], matmul.columns * strip))
        pieces = Pieces(g, "piece", height, width, self.elements)
        arrived = g.events(
            "strip_arrived",
            (self.used * blocks, strips),
            expects=(world - 1) * pieces.count,
            cross_rank=True,
        )
        turns = g.let("turns", self.used * ceildiv(blocks, group) * strips)
        lag = ceildiv(LAG, maximum(1, group * strip))
        lag = g.let("lag", maximum(0, minimum(turns - 1, lag)))
        down, across = pieces.down, pieces.across
        with g.loop(turn=turns + lag) as turn:
            b, p, r, c = grid = g.grid(
                block=group,
                peer=world - 1,
                sent_row=pieces.down,
                sent_piece=pieces.across,
            )
            i, s = turn // strips * group + b, turn % strips
            to, piece = (g.rank + 1 + p) % world, pieces.place(i, s, r, c)
            g.call(
                push_tile(self.y.dtype),
                grid,
                name="send_strip",
                reads=[self.slots[g.rank, *piece]],
                writes=[self.slots.on(to)[g.rank, *piece]],
                waits=[events[0, i, s].when(i < blocks)],
                notifies=[arrived.on(to)[i, s].when(i < blocks)],
            )
            b, r, c = grid = g.grid(block=group, summed_row=down, summed_piece=across)
            before = maximum(0, turn - lag)
            i = select(turn < lag, blocks, before // strips * group + b)
            s = before % strips
            piece = pieces.place(i, s, r, c)
            g.call(
                sum_ranks(self.y.dtype),
                grid,
                name="add_strip",
                reads=[self.slots[span(0, world), *piece]],
                writes=[self.y[piece]],
                waits=[
                    each.when(i < blocks) for each in (arrived[i, s], events[0, i, s])
                ],
            )


@dataclass(frozen=True)
class StoredSums:
    """y [rows, n]: the sums over ranks of the result of `matmul`, on one host, without
    split-K. The tiles of each rank are stored in its place of `slots` [world, rows, n]
    on all ranks, and each adds all places, strip by strip.

    elements: that a task adds. used: 1, or 0: then there is nothing to do."""

    g: Graph
    matmul: RankTiles
    slots: Tensor
    y: Tensor
    elements: Expr
    used: Expr

    def add(self) -> None:
        """Add the tiles, and the sums."""
        g, matmul = self.g, self.matmul
        strip = g.let("stored_strip", matmul.strip)
        strips = g.let("stored_strips", ceildiv(matmul.across, strip))
        arrived = g.events(
            "tiles_arrived",
            (self.used * matmul.down, strips),
            expects=lambda _, s: (
                g.world_size * minimum(strip, matmul.across - s * strip)
            ),
            cross_rank=True,
        )
        *peers, _ = every_rank(g)
        matmul.add_whole_tiles(
            columns=g.let("stored_columns", self.used * matmul.whole),
            call="tile_on_ranks",
            axes="stored_",
            to=Stored(
                PlacesOnRanks(g, self.slots, peers),
                store_on_ranks(g.world_size),
                EventsOnRanks(arrived, strip, peers),
            ),
        )
        width = g.let("stored_width", minimum(self.y.shape[1], matmul.columns * strip))
        pieces = Pieces(g, "stored_piece", matmul.height, width, self.elements)
        i, s, r, c = grid = g.grid(
            arrived_block=self.used * matmul.down,
            arrived_strip=strips,
            added_row=pieces.down,
            added_piece=pieces.across,
        )
        piece = pieces.place(i, s, r, c)
        g.call(
            sum_ranks(self.y.dtype),
            grid,
            name="add_stored",
            reads=[self.slots[span(0, g.world_size), *piece]],
            writes=[self.y[piece]],
            waits=[arrived[i, s]],
        )


class PlacesOnRanks(NamedTuple):
    """This rank's place of `slots` [world, rows, n], here and on peers."""

    g: Graph
    slots: Tensor
    peers: Sequence[Expr]

    @property
    def shape(self) -> tuple[Expr, Expr]:
        """Rows and columns."""
        _, rows, columns = self.slots.shape
        return rows, columns

    def regions(self, rows: Any, columns: Any) -> list[Region]:
        """The own one first."""
        own = self.g.rank, rows, columns
        return [self.slots[own], *(self.slots.on(peer)[own] for peer in self.peers)]


class EventsOnRanks(NamedTuple):
    """The event of a row of tiles and a strip of them, here and on peers."""

    events: EventTensor
    strip: Expr
    peers: Sequence[Expr]

    def of_tile(self, i: Expr, j: Expr, rows: Expr) -> Sequence[EventRef]:
        """Those of the tile in row i and column j of tiles."""
        own = i, j // self.strip
        return [self.events[own], *(self.events.on(p)[own] for p in self.peers)]


class Pieces:
    """The pieces of a strip of a block of rows, of about `elements` each: some rows, or
    some columns of a row. down, across: their number."""

    def __init__(
        self, g: Graph, name: str, height: Expr, width: Expr, elements: Expr
    ) -> None:
        self._height, self._width = height, width
        rows = minimum(height, maximum(1, elements // width))
        self._rows = g.let(f"{name}_rows", rows)
        self._columns = g.let(f"{name}_columns", minimum(width, elements))
        self.down = g.let(f"{name}_down", ceildiv(height, self._rows))
        self.across = g.let(f"{name}_across", ceildiv(width, self._columns))

    @property
    def count(self) -> Expr:
        """Of all of them."""
        return self.down * self.across

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
