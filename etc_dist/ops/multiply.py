"""A matrix multiplication in a graph, with split-K for the tiles of a wave that is not
full."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from etc_dist.functions.epilogue import Epilogue, store
from etc_dist.functions.matmul import STAGE_K
from etc_dist.functions.tile_matmul import (
    GROUP_WORDS,
    SLICE,
    SLICE_WORDS,
    Tiles,
    TileShape,
)
from etc_dist.ir import (
    EventRef,
    EventTensor,
    Expr,
    Graph,
    Region,
    Tensor,
    ceildiv,
    equal,
    minimum,
    select,
    span,
    tile,
)
from etc_dist.ops.order import ROW_GROUP, grouped_rows


class RowEvents(NamedTuple):
    """An event for each block of rows of a matrix. rows: of a block, a multiple of
    those of each tile that waits or notifies, or all rows."""

    events: EventTensor
    rows: Expr

    def at(self, row: Expr) -> EventRef:
        """The event of the block of a row."""
        return self.events[row // self.rows]


class TiledMatmul:
    """y [m, n] = epilogue of x [m, k] and `weights`, in a graph `g`. The names of its
    numbers, events and calls begin with `name`. `tiles` have the columns of a dim
    (`columns=`). Its value and those of the two dims here are chosen together: see
    `ops/tile_model.py`.

    The last `{name}split_tile_columns` columns of tiles use split-K, with
    `{name}parts` tasks for each tile. These tasks begin first, and store fp32 sums.
    Tasks that end the matmul add them, in the order of k."""

    def __init__(
        self,
        g: Graph,
        name: str,
        tiles: Tiles,
        dtype: str,
        x: Tensor,
        weights: Sequence[Tensor],
        y: Tensor,
        epilogue: Epilogue = store,
    ) -> None:
        self._g, self._name, self._tiles, self._dtype = g, name, tiles, dtype
        self._x, self._weights, self._y, self._epilogue = x, weights, y, epilogue
        self._columns = tiles.half_columns() if epilogue.gated else tiles.columns
        split, parts = g.dims(f"{name}split_tile_columns {name}parts")
        self._split, self._parts = split, parts
        m, n = y.shape
        self._down = g.let(f"{name}tiles_down", ceildiv(m, tiles.rows))
        across = ceildiv(n, self._columns)
        self._whole = g.let(f"{name}whole_tile_columns", across - split)
        # A task adds the parts of a slice of a tile: SLICE of its rows if swapped, else
        # of its columns.
        self._sliced = select(equal(tiles.is_swapped, 1), tiles.rows, self._columns)
        self._slices = g.let(f"{name}slices", ceildiv(self._sliced, SLICE))
        self._complete: RowEvents | None = None

    def complete(self, name: str, rows: Expr) -> RowEvents:
        """New events, which the last tasks of each block of `rows` rows of y notify:
        those of whole tiles, and those that add parts."""
        g, m = self._g, self._y.shape[0]
        row_tasks = g.let(f"{name}_tasks", self._whole + self._split * self._slices)

        def tasks(block: Expr) -> Expr:
            """Of all rows of tiles of a block."""
            in_block = minimum(rows, m - block * rows)
            return row_tasks * ceildiv(in_block, self._tiles.rows)

        blocks = g.let(f"{name}_blocks", ceildiv(m, rows))
        events = g.events(name, (blocks,), expects=tasks)
        self._complete = RowEvents(events, rows)
        return self._complete

    def add(self, waits: RowEvents | None = None) -> None:
        """Add the calls. waits: the events of blocks of rows of x."""
        g, name, tiles = self._g, self._name, self._tiles
        k, words, parts = self._x.shape[1], tiles.part_words, self._parts
        part_stages = ceildiv(ceildiv(k, STAGE_K * tiles.k_boxes), parts)
        part_boxes = g.let(f"{name}part_boxes", part_stages * tiles.k_boxes)
        shape = self._down, self._split, parts, words
        sums = g.local(f"{name}sums", shape, "float32")
        stored = g.events(f"{name}parts_stored", shape[:2], expects=parts)
        self._add_parts(sums, stored, STAGE_K * part_boxes, waits)
        self._add_whole_tiles(waits)
        self._add_sums(sums, stored)

    def _add_parts(
        self,
        sums: Tensor,
        stored: EventTensor,
        part_k: Expr,
        waits: RowEvents | None,
    ) -> None:
        g, name = self._g, self._name
        sizes = self._parts, self._down, self._split
        axes = [f"{name}{axis}" for axis in ("part", "part_row", "part_column")]
        p, i, j = grid = g.grid(**dict(zip(axes, sizes, strict=True)))
        g.call(
            self._tiles.matmul(self._dtype, self._epilogue, is_part=True),
            grid,
            reads=self._operands(i, self._whole + j, tile(p, part_k)),
            writes=[sums[i, j, p, :]],
            waits=self._of(waits, i),
            notifies=[stored[i, j]],
            values=self._tiles.values,
            name=f"{name}multiply_parts",
        )

    def _add_whole_tiles(self, waits: RowEvents | None) -> None:
        g, name, tiles = self._g, self._name, self._tiles
        down, across = self._down, self._whole
        i, j = grid = g.grid(**{f"{name}row": down, f"{name}column": across})
        g.call(
            tiles.matmul(self._dtype, self._epilogue),
            grid,
            reads=self._operands(i, j, slice(None)),
            writes=[self._y[tile(i, tiles.rows), tile(j, self._columns)]],
            waits=self._of(waits, i),
            notifies=self._of(self._complete, i),
            order=lambda t: grouped_rows(t, down, across, ROW_GROUP),
            values=tiles.values,
            name=f"{name}tile_matmul",
        )

    def _add_sums(self, sums: Tensor, stored: EventTensor) -> None:
        g, name, tiles = self._g, self._name, self._tiles
        sizes = self._down, self._split, self._slices
        axes = [f"{name}{axis}" for axis in ("sum_row", "sum_column", "slice")]
        i, j, s = grid = g.grid(**dict(zip(axes, sizes, strict=True)))
        is_swapped = tiles.is_swapped
        slice_size = minimum(SLICE, self._sliced - s * SLICE)
        y_rows, y_columns = (
            span(
                tile_idx * tile_size + s * SLICE * is_sliced,
                select(equal(is_sliced, 1), slice_size, tile_size),
            )
            for tile_idx, tile_size, is_sliced in (
                (i, tiles.rows, is_swapped),
                (self._whole + j, self._columns, 1 - is_swapped),
            )
        )
        offsets = [s * SLICE_WORDS]
        if self._epilogue.gated:
            # Up follows gate along the columns. If these are the M of wgmma, a slice
            # has the sums of both.
            up_words = (1 - is_swapped) * self._columns * (GROUP_WORDS // 8)
            offsets += [s * SLICE_WORDS + up_words]
        g.call(
            tiles.sum_parts(self._dtype, self._epilogue),
            grid,
            reads=[sums[i, j, :, span(offset, SLICE_WORDS)] for offset in offsets],
            writes=[self._y[y_rows, y_columns]],
            waits=[stored[i, j]],
            notifies=self._of(self._complete, i),
            values=tiles.values,
            name=f"{name}sum_parts",
        )

    def _operands(self, i: Expr, j: Expr, k_span: object) -> list[Region]:
        """x and the weights of tile (i, j), and some of k."""
        columns, weight_tile = tile(j, self._columns), self._tiles.weight_tile
        x_tile = self._x[tile(i, self._tiles.rows), k_span]
        return [x_tile, *(weight_tile(w, columns, k_span) for w in self._weights)]

    def _of(self, events: RowEvents | None, i: Expr) -> list[EventRef]:
        """The event of the rows of tile i."""
        return [] if events is None else [events.at(i * self._tiles.rows)]


def tiles_of_dims(
    g: Graph,
    name: str,
    shapes: Sequence[TileShape],
    all_rows: Expr,
    w_layout: str = "nk",
) -> Tiles:
    """Tiles that are selected by dims: `{name}shape` one of `shapes_for(w_layout,
    shapes)`, by position, and `{name}column_groups` the columns of a tile, 8 in each
    group. all_rows: of x, which tiles divide evenly."""
    shape, column_groups = g.dims(f"{name}shape {name}column_groups")
    columns = 8 * column_groups
    return Tiles(g, f"{name}tile", shape, shapes, all_rows, w_layout, columns=columns)


def add_matmul(
    g: Graph,
    name: str,
    tiles: Tiles,
    dtype: str,
    x: Tensor,
    weights: Sequence[Tensor],
    y: Tensor,
    epilogue: Epilogue = store,
) -> None:
    """Add a TiledMatmul without events of its rows."""
    TiledMatmul(g, name, tiles, dtype, x, weights, y, epilogue).add()
