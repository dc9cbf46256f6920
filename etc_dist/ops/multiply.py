"""A matrix multiplication in a graph, with split-K for the tiles of a wave that is not
full."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple, Protocol

from etc_dist.functions.epilogue import Epilogue, store
from etc_dist.functions.scaled_weights import Place, ScaledTensor
from etc_dist.functions.tile_matmul import (
    GROUP_WORDS,
    SLICE,
    SLICE_WORDS,
    WITH_PARTS,
    Tiles,
)
from etc_dist.functions.tile_shape import TileShape
from etc_dist.functions.weight_layouts import STAGE_K
from etc_dist.ir import (
    EventRef,
    EventTensor,
    Expr,
    Graph,
    Region,
    Tensor,
    ceildiv,
    equal,
    maximum,
    minimum,
    select,
    span,
    tile,
)
from etc_dist.ir.call import Grid
from etc_dist.ir.expr import Comparison, wrap
from etc_dist.ir.order import Order
from etc_dist.ops.near_ranks import here_and_on
from etc_dist.ops.tile_order import ROW_GROUP, grouped_rows, row_group

SEGMENT = 512
"""Columns of rows that are sent while a matmul runs. Assumed: shorter segments leave a
part of NVLink's rate unused."""


class TileEvents(Protocol):
    """The events that tiles wait for, or notify."""

    def of_tile(self, i: Expr, j: Expr, rows: Expr) -> Sequence[EventRef]:
        """Those of the tile in row i and column j of tiles of so many rows."""


class AllTiles(NamedTuple):
    """The same events for all tiles."""

    events: Sequence[EventRef]

    def of_tile(self, i: Expr, j: Expr, rows: Expr) -> Sequence[EventRef]:
        """All of them."""
        return self.events


class RowEvents(NamedTuple):
    """An event for each block of rows of a matrix, along the last axis of `events`, or
    for each block of rows and strip of columns, along the last two. rows: of a block, a
    multiple of those of each tile that waits or notifies, or all rows. place: in the
    other axes. strip: columns of tiles in a strip; None: blocks have all columns.
    peers: ranks whose same events tiles notify, too."""

    events: EventTensor
    rows: Expr
    place: tuple[Expr | int, ...] = ()
    strip: Expr | None = None
    peers: Sequence[Expr] = ()

    def of_strip(self, row: Expr, strip: Expr) -> EventRef:
        """The event of the block of a row, and of a strip."""
        return self.events[(*self.place, row // self.rows, strip)]

    def of(self, *place: Expr | int) -> RowEvents:
        """The events at a place."""
        return self._replace(place=place)

    def at(self, row: Expr) -> EventRef:
        """The event of the block of a row, and of its first strip."""
        return self._of_block(row // self.rows, wrap(0))[0]

    def of_tile(self, i: Expr, j: Expr, rows: Expr) -> Sequence[EventRef]:
        """The event of the tile in row i and column j of tiles of so many rows."""
        block = i if self.rows is rows else i * rows // self.rows
        return self._of_block(block, j)

    def _of_block(self, block: Expr, j: Expr) -> list[EventRef]:
        strip = () if self.strip is None else (j // self.strip,)
        return here_and_on(self.peers, self.events, *self.place, block, *strip)


class Matrix(NamedTuple):
    """The last two axes of a tensor, at a place in the others. scales: those of rows
    that are codes, at the same place."""

    tensor: Tensor
    place: Place = ()
    scales: Tensor | None = None

    @classmethod
    def of(cls, x: Tensor | ScaledTensor, place: Place = ()) -> Matrix:
        """Rows of elements, or of codes with scales."""
        if isinstance(x, ScaledTensor):
            return cls(x.codes, place, x.scales)
        return cls(x, place)

    @property
    def shape(self) -> tuple[Expr, Expr]:
        """Rows and columns."""
        rows, columns = self.tensor.shape[-2:]
        return rows, columns

    def at(self, rows: Any, columns: Any) -> Region:
        """The region of some rows and columns."""
        return self.tensor[(*self.place, rows, columns)]

    def regions(self, rows: Any, columns: Any) -> list[Region]:
        """The regions to which a tile is written."""
        return [self.at(rows, columns)]


class Results(Protocol):
    """Where tiles are written, at one or several places."""

    @property
    def shape(self) -> tuple[Expr, Expr]:
        """Rows and columns."""

    def regions(self, rows: Any, columns: Any) -> list[Region]:
        """The regions of some rows and columns."""


class Stored(NamedTuple):
    """Where and by which epilogue tiles are stored, and the events that they notify."""

    results: Results
    epilogue: Epilogue
    events: TileEvents | None


class Turns(NamedTuple):
    """The loops around a matmul: the extents, and the coordinates of a turn."""

    extents: tuple[Expr, ...] = ()
    turn: tuple[Expr, ...] = ()


NO_TURNS = Turns()


class TiledMatmul:
    """y [m, n] = epilogue of x [m, k] and `weights`, in a graph `g`. The names of its
    numbers, events and calls begin with `name`. `tiles` have the columns of a dim
    (`columns=`). Its value and those of the two dims here are chosen together: see
    `ops/tile_model.py`.

    The last `{name}split_tile_columns` columns of tiles use split-K, with
    `{name}parts` tasks for each tile. These tasks begin first, and store fp32 sums.
    Tasks that end the matmul add them, in the order of k. Epilogues other than
    WITH_PARTS do not have these dims, and no tile uses split-K; nor without `divides`.

    Tiles run in groups of ROW_GROUP rows of tiles; with several `owners` of rows, in
    those of `row_group`. place: of the weights in stacks. turns: of loops around the
    matmul. options: further arguments of the calls that multiply. clips, without
    `divides`: the tensors have more than m rows, which are not read or written. when,
    without `divides`: otherwise tasks have no rows, and neither wait nor notify. x has
    scales if `tiles` have float8 activations."""

    def __init__(
        self,
        g: Graph,
        name: str,
        tiles: Tiles,
        dtype: str,
        x: Tensor | Matrix | ScaledTensor,
        weights: Sequence[Tensor | ScaledTensor],
        y: Tensor | Results,
        epilogue: Epilogue = store,
        *,
        owners: int = 1,
        place: Place = (),
        turns: Turns = NO_TURNS,
        divides: bool = True,
        clips: bool = False,
        when: Comparison | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self._g, self._name, self._tiles, self._dtype = g, name, tiles, dtype
        self._x = x if isinstance(x, Matrix) else Matrix.of(x)
        self._y: Results = Matrix(y) if isinstance(y, Tensor) else y
        self._weights, self._epilogue, self._place = weights, epilogue, place
        self._turns, self._clips, self._when = turns, clips, when
        self._options = options or {}
        self._divides = divides and epilogue in WITH_PARTS
        self._columns = tiles.half_columns() if epilogue.gated else tiles.columns
        self._split, self._parts = wrap(0), wrap(1)
        if self._divides:
            dims = g.dims(f"{name}split_tile_columns {name}parts")
            self._split, self._parts = dims
        m, n = self._y.shape
        self._down = down = g.let(f"{name}tiles_down", ceildiv(m, tiles.rows))
        self._group: Expr | int = ROW_GROUP
        if owners > 1:
            row_bytes = self._x.tensor.itemsize * self._x.shape[1]
            group = row_group(down, tiles.rows, row_bytes, owners)
            self._group = g.let(f"{name}row_group", group)
        across = ceildiv(n, self._columns)
        self._whole = g.let(f"{name}whole_tile_columns", across - self._split)
        # A task adds the parts of a slice of a tile: SLICE of its rows if swapped, else
        # of its columns.
        self._sliced = select(equal(tiles.is_swapped, 1), tiles.rows, self._columns)
        self._slices = g.let(f"{name}slices", ceildiv(self._sliced, SLICE))
        self._complete: TileEvents | None = None
        self.columns = self._columns
        """Of a tile."""

    @cached_property
    def across(self) -> Expr:
        """The number of tiles in a row of them."""
        return self._g.let(f"{self._name}tiles_across", self._whole + self._split)

    @property
    def strip(self) -> Expr:
        """The columns of tiles of a strip of about SEGMENT columns, all of nearly equal
        size."""
        num_strips = ceildiv(self.across, ceildiv(SEGMENT, self.columns))
        return ceildiv(self.across, num_strips)

    def last_of_strip(self, strip: Expr, strip_idx: Expr) -> tuple[Expr, Expr]:
        """Of a row of tiles and a strip of `strip` columns of tiles: the number of
        tiles, and how many more of the last tasks there are, by split-K."""
        num_tiles = minimum(strip, self.across - strip_idx * strip)
        end_idx = strip_idx * strip + num_tiles
        num_split = maximum(0, minimum(num_tiles, end_idx - self._whole))
        return num_tiles, num_split * (self._slices - 1)

    @property
    def last_tasks(self) -> Expr:
        """The number of the last tasks: those of whole tiles, and those that add
        parts."""
        return self._down * (self._whole + self._split * self._slices)

    def notify(self, events: Sequence[EventRef]) -> None:
        """Let all last tasks notify these events."""
        self._complete = AllTiles(events)

    def complete(self, name: str, rows: Expr) -> RowEvents:
        """New events, which the last tasks of each block of `rows` rows of y notify:
        those of whole tiles, and those that add parts."""
        g, m = self._g, self._y.shape[0]
        num_row_tasks = g.let(f"{name}_tasks", self._whole + self._split * self._slices)

        def tasks(block: Expr) -> Expr:
            """Of all rows of tiles of a block."""
            in_block = minimum(rows, m - block * rows)
            return num_row_tasks * ceildiv(in_block, self._tiles.rows)

        num_blocks = g.let(f"{name}_blocks", ceildiv(m, rows))
        events = RowEvents(g.events(name, (num_blocks,), expects=tasks), rows)
        self._complete = events
        return events

    def complete_strips(
        self,
        name: str,
        strip: Expr,
        ranks: Expr | int = 1,
        own_idx: int = 0,
        num_strips: Expr | None = None,
    ) -> RowEvents:
        """New events [ranks, blocks, strips] of blocks of the rows of a tile, and
        strips of `strip` columns of tiles. own_idx: the place of the rows of y, whose
        last tasks notify them. num_strips: the first ones, if the others have no
        events; then only tiles of these may be added by `add_whole_tiles`."""
        g, rows = self._g, self._tiles.rows

        def tasks(rank: Expr, block: Expr, strip_idx: Expr) -> Expr:
            num_tiles, num_more = self.last_of_strip(strip, strip_idx)
            return num_tiles + select(equal(rank, wrap(own_idx)), num_more, 0)

        all_strips = ceildiv(self.across, strip) if num_strips is None else num_strips
        num_strips = g.let(f"{name}_strips", all_strips)
        events = g.events(name, (ranks, self._down, num_strips), expects=tasks)
        self._complete = RowEvents(events, rows, (own_idx,), strip)
        return self._complete

    def add(
        self,
        waits: TileEvents | None = None,
        add_whole_tiles: Callable[[], None] | None = None,
        add_sums: Callable[[], None] | None = None,
    ) -> None:
        """Add the calls. waits: the events of x. add_whole_tiles: adds the tiles
        without split-K, in place of `add_whole_tiles(waits)`. add_sums: the sums of
        parts, in place of `add_sums()`."""
        g, name, tiles = self._g, self._name, self._tiles
        add_whole_tiles = add_whole_tiles or partial(self.add_whole_tiles, waits)
        if not self._divides:
            return add_whole_tiles()
        k, words, num_parts = self._x.shape[1], tiles.part_words, self._parts
        num_part_stages = ceildiv(ceildiv(k, STAGE_K * tiles.k_boxes), num_parts)
        num_part_boxes = g.let(f"{name}part_boxes", num_part_stages * tiles.k_boxes)
        shape = self._down, self._split, num_parts, words
        sums = g.local(f"{name}sums", shape, "float32")
        event_of = self._add_stored(shape[:2])
        self._add_parts(sums, event_of, STAGE_K * num_part_boxes, waits)
        add_whole_tiles()
        self._stored_parts = sums, event_of
        (add_sums or self.add_sums)()

    def _add_stored(self, tiles: tuple[Expr, Expr]) -> Callable[..., EventRef]:
        """The event after which the parts of a tile can be read: in a loop that of all
        tiles, so that there are few events."""
        name, (extents, turn) = f"{self._name}parts_stored", self._turns
        if not extents:
            events = self._g.events(name, tiles, expects=self._parts)
            return lambda i, j: events[i, j]
        down, split = tiles
        events = self._g.events(name, extents, expects=down * split * self._parts)
        return lambda i, j: events[turn]

    def add_whole_tiles(
        self,
        waits: TileEvents | None = None,
        *,
        columns: Expr | None = None,
        first_column: Expr | int = 0,
        call: str = "tile_matmul",
        axes: str = "",
        to: Stored | None = None,
    ) -> None:
        """Add the tiles without split-K. columns: how many columns of tiles there are,
        if not all of them. axes: before the names of the coordinates. first_column, to:
        as for `multiply`."""
        name, down, group = self._name, self._down, self._group
        across = self._whole if columns is None else columns
        self.multiply(
            call,
            self._g.grid(**{f"{name}{axes}row": down, f"{name}{axes}column": across}),
            (self._x, self._y),
            first_column=first_column,
            waits=waits,
            notifies=self._complete,
            order=lambda t: grouped_rows(t, down, across, group),
            to=to,
        )

    def multiply(
        self,
        call: str,
        grid: Grid,
        operands: tuple[Matrix, Results],
        *,
        first_column: Expr | int = 0,
        waits: TileEvents | None = None,
        notifies: TileEvents | None = None,
        order: Order | None = None,
        to: Stored | None = None,
    ) -> None:
        """Add whole tiles of x and y, `operands`, one for each coordinate of `grid`.
        Its last axes are those of the rows and columns of tiles, these counted from
        `first_column` on. to: where tiles are stored, in place of y."""
        (x, y), (*_, i, j) = operands, grid
        epilogue = self._epilogue
        if to is not None:
            y, epilogue, notifies = to
        column = first_column + j
        rows, columns = tile(i, self._tiles.rows), tile(column, self._columns)
        if self._clips or self._when is not None:
            size = minimum(rows.size, y.shape[0] - rows.start)
            if self._when is not None:
                size = select(self._when, 1, 0) * size
            rows = span(rows.start, size)
        may_have_no_rows = self._when is not None
        self._g.call(
            self._tiles.matmul(
                self._dtype, epilogue, may_have_no_rows=may_have_no_rows
            ),
            grid,
            reads=self._reads(x, rows, columns, slice(None)),
            writes=y.regions(rows, columns),
            waits=self._of(waits, i, column),
            notifies=self._of(notifies, i, column),
            order=order,
            values=self._tiles.values,
            name=f"{self._name}{call}",
            **self._options,
        )

    def _add_parts(
        self,
        sums: Tensor,
        event_of: Callable[..., EventRef],
        part_k: Expr,
        waits: TileEvents | None,
    ) -> None:
        g, name = self._g, self._name
        sizes = self._parts, self._down, self._split
        axes = [f"{name}{axis}" for axis in ("part", "part_row", "part_column")]
        p, i, j = grid = g.grid(**dict(zip(axes, sizes, strict=True)))
        k_span, column = tile(p, part_k), self._whole + j
        g.call(
            self._tiles.matmul(self._dtype, self._epilogue, is_part=True),
            grid,
            reads=self._reads(
                self._x,
                tile(i, self._tiles.rows),
                tile(column, self._columns),
                k_span,
            ),
            writes=[sums[i, j, p, :]],
            waits=self._of(waits, i, column),
            notifies=[event_of(i, j)],
            values=self._tiles.values,
            name=f"{name}multiply_parts",
            **self._options,
        )

    def add_sums(
        self,
        *,
        columns: Expr | None = None,
        call: str = "sum_parts",
        axes: str = "",
        to: Stored | None = None,
    ) -> None:
        """Add the sums of the parts of tiles; arguments as for `add_whole_tiles`."""
        g, name, tiles = self._g, self._name, self._tiles
        sums, event_of = self._stored_parts
        y, epilogue, complete = to or (self._y, self._epilogue, self._complete)
        sizes = self._down, self._split if columns is None else columns, self._slices
        names = [f"{name}{axes}{axis}" for axis in ("sum_row", "sum_column", "slice")]
        i, j, s = grid = g.grid(**dict(zip(names, sizes, strict=True)))
        is_swapped, column = tiles.is_swapped, self._whole + j
        slice_size = minimum(SLICE, self._sliced - s * SLICE)
        y_rows, y_columns = (
            span(
                tile_idx * tile_size + s * SLICE * is_sliced,
                select(equal(is_sliced, 1), slice_size, tile_size),
            )
            for tile_idx, tile_size, is_sliced in (
                (i, tiles.rows, is_swapped),
                (column, self._columns, 1 - is_swapped),
            )
        )
        offsets = [s * SLICE_WORDS]
        if self._epilogue.gated:
            # Up follows gate along the columns. If these are the M of wgmma, a slice
            # has the sums of both.
            up_words = (1 - is_swapped) * self._columns * (GROUP_WORDS // 8)
            offsets += [s * SLICE_WORDS + up_words]
        g.call(
            tiles.sum_parts(self._dtype, epilogue),
            grid,
            reads=[sums[i, j, :, span(offset, SLICE_WORDS)] for offset in offsets],
            writes=y.regions(y_rows, y_columns),
            waits=[event_of(i, j)],
            notifies=self._of(complete, i, column),
            values=tiles.values,
            name=f"{name}{call}",
        )

    def _reads(self, x: Matrix, rows: Any, columns: Any, k_span: Any) -> list[Region]:
        """For some rows and columns of y, and some of k."""
        tiles, place = self._tiles, self._place
        weights = tiles.weight_tiles(self._weights, columns, k_span, place)
        reads = [x.at(rows, k_span), *weights]
        if x.scales is not None:
            reads.append(tiles.x_scales(x.scales, rows, k_span, x.place))
        return reads

    def _of(self, events: TileEvents | None, i: Expr, j: Expr) -> Sequence[EventRef]:
        """The events of the tile in row i and column j of tiles."""
        refs = [] if events is None else events.of_tile(i, j, self._tiles.rows)
        return refs if self._when is None else [ref.when(self._when) for ref in refs]


def tiles_of_dims(
    g: Graph,
    name: str,
    shapes: Sequence[TileShape],
    all_rows: Expr | None = None,
    w_layout: str = "nk",
    *,
    has_peers: bool = False,
) -> Tiles:
    """Tiles that are selected by dims: `{name}shape` one of `shapes_for(w_layout,
    shapes)`, by position, and `{name}column_groups` the columns of a tile, 8 in each
    group. all_rows: of x, which tiles divide evenly, if they do. has_peers: as for
    `Tiles`."""
    shape, column_groups = g.dims(f"{name}shape {name}column_groups")
    columns = 8 * column_groups
    kinds = {"columns": columns, "has_peers": has_peers}
    return Tiles(g, f"{name}tile", shape, shapes, all_rows, w_layout, **kinds)
