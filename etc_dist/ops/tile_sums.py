"""Sums over the ranks of a host of a matmul's result, which every rank gets: of tiles
that their epilogues store on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from etc_dist.functions.epilogue import store_on_ranks
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
    span,
)
from etc_dist.ir.tensor import Tile
from etc_dist.ops.multiply import SEGMENT, Stored
from etc_dist.ops.rank_tiles import RankTiles
from etc_dist.ops.sum_steps import every_rank
from etc_dist.ops.tile_order import ROW_GROUP, grouped_rows


@dataclass(frozen=True)
class TileSums:
    """y [rows, n]: the sums over ranks of the result of `matmul`, on one host. The
    tiles of each rank are stored in its place of `slots` [world, rows, n] on all ranks,
    and each adds all places, strip by strip.

    elements: that a task adds. used: 1, or 0: then there is nothing to do."""

    g: Graph
    matmul: RankTiles
    slots: Tensor
    y: Tensor
    elements: Expr
    used: Expr

    def add(self) -> None:
        """Add the tiles, and the sums."""
        g, matmul, arrived, strip = self.g, self.matmul, self._arrived, self._strip
        own, used = 1 - self.used, self.used
        *peers, _ = every_rank(g)
        to = Stored(
            PlacesOnRanks(g, self.slots, peers),
            store_on_ranks(g.world_size),
            EventsOnRanks(arrived, strip, peers),
        )

        def add_whole_tiles() -> None:
            columns = g.let("own_columns", own * matmul.whole)
            matmul.add_whole_tiles(columns=columns)
            columns = g.let("stored_columns", used * matmul.whole)
            call = "tile_on_ranks"
            matmul.add_whole_tiles(columns=columns, call=call, axes="stored_", to=to)

        def add_sums() -> None:
            matmul.add_sums(columns=g.let("own_sums", own * matmul.split))
            columns = g.let("stored_sums", used * matmul.split)
            call = "sum_on_ranks"
            matmul.add_sums(columns=columns, call=call, axes="stored_", to=to)

        matmul.add(add_whole_tiles=add_whole_tiles, add_sums=add_sums)
        self._add_stored()

    @cached_property
    def _strip(self) -> Expr:
        """As `TiledMatmul.strip`, but with at most SEGMENT columns: a warp adds so many
        of a row at once."""
        across = self.matmul.across
        num_strips = ceildiv(across, maximum(1, SEGMENT // self.matmul.columns))
        return self.g.let("stored_strip", ceildiv(across, num_strips))

    @cached_property
    def _arrived(self) -> EventTensor:
        """The events of a row of tiles and a strip of them."""
        g, matmul, strip = self.g, self.matmul, self._strip

        def tasks(block: Expr, strip_idx: Expr) -> Expr:
            num_tiles, num_more = matmul.last_of_strip(strip, strip_idx)
            return g.world_size * (num_tiles + num_more)

        num_strips = g.let("stored_strips", ceildiv(matmul.across, strip))
        shape = self.used * matmul.down, num_strips
        return g.events("tiles_arrived", shape, expects=tasks, cross_rank=True)

    def _add_stored(self) -> None:
        g, matmul, arrived, strip = self.g, self.matmul, self._arrived, self._strip
        _, num_strips = arrived.shape
        width = g.let("stored_width", minimum(self.y.shape[1], matmul.columns * strip))
        pieces = Pieces(g, "stored_piece", matmul.height, width, self.elements)
        down, across, num_pieces = pieces.down, pieces.across, pieces.count
        i, s, r, c = grid = g.grid(
            arrived_block=self.used * matmul.down,
            arrived_strip=num_strips,
            added_row=down,
            added_piece=across,
        )

        def order(t: Expr) -> tuple[Expr, ...]:
            """That of the tiles."""
            strip_of_block = grouped_rows(
                t // num_pieces, matmul.down, num_strips, ROW_GROUP
            )
            return *strip_of_block, t % num_pieces // across, t % across

        piece = pieces.place(i, s, r, c)
        g.call(
            sum_ranks(self.y.dtype),
            grid,
            name="add_stored",
            reads=[self.slots[span(0, g.world_size), *piece]],
            writes=[self.y[piece]],
            waits=[arrived[i, s]],
            order=order,
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
