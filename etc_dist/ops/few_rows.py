"""GEMMs with few rows on several ranks: rows are gathered before they are multiplied,
and returned to their owners afterwards. The number of rows selects the tile shape."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from etc_dist.functions.matmul import TILE, W_LAYOUTS
from etc_dist.functions.push_rows import push_rows
from etc_dist.functions.sum_ranks import sum_ranks
from etc_dist.functions.tile_matmul import Tiles, TileShape, shapes_for
from etc_dist.ir import (
    DeviceFunction,
    EventRef,
    EventTensor,
    Expr,
    Graph,
    GraphFunction,
    Tensor,
    ceildiv,
    equal,
    minimum,
    select,
    span,
    tile,
)
from etc_dist.ops.deterministic import BATCH
from etc_dist.ops.matmul_policy import (
    BLOCK,
    BLOCK_UNIT,
    BLOCKS_IN_ONE,
    SHAPES,
    explained,
    has_blocks,
)
from etc_dist.ops.operation import Candidate
from etc_dist.ops.order import tile_grid
from etc_dist.ops.tuning import Tuning
from etc_dist.schedule.plan import Choice
from etc_dist.world import World

SUMMED = 1024
"""Columns of a row whose partial sums one warp adds."""
SUMMED_FEW = 128
"""With up to so many rows on all ranks, a warp adds half as many columns: on up to four
ranks it loads them at once."""
PUSHED = 2048
"""Columns of a row that one warp pushes, which it loads at once, with up to PUSHED_FEW
rows on all ranks; or a multiple of them, so that a row has at most PIECES pieces. With
more rows a warp pushes whole ones: at 128 rows, dividing them was slower."""
PUSHED_FEW, PIECES = 32, 4
MOST_ROWS = 1024
"""The most rows, over all ranks, that are gathered first; more are multiplied as they
arrive."""


def has_few_rows(rows: int, world_size: int, most: int = MOST_ROWS) -> bool:
    """Whether `rows` of each rank are few: at most `most` on all ranks, and not whole
    blocks of TILE, which the other graphs multiply as they arrive."""
    return rows * world_size <= most and rows % TILE != 0


def with_few_rows(
    graph: Callable[..., GraphFunction],
    many: Candidate,
    world: World,
    deterministic: str,
) -> list[Candidate]:
    """The candidates of a GEMM of x [rows, k] and w [n, k] or [k, n]: `graph`, with the
    dim `shape`, for few rows, and `many`. Only `many` on several hosts, and if it has
    options such as a tile size."""
    size = world.size
    if world.hosts.count > 1 or many.options:
        return [many]

    def choose(
        tuning: Tuning, w_layout: str, dims: Mapping[str, int], workers: int
    ) -> list[Choice]:
        sizes = size * dims["rows"], dims["n"], dims["k"]
        given = sizes, workers, shapes_for(w_layout, SHAPES), tuning
        in_order, in_blocks = deterministic == BATCH, has_blocks(sizes[0], size)
        return [explained("shape", *given, in_order=in_order, in_blocks=in_blocks)]

    def capacity(dims: Mapping[str, int]) -> list[Mapping[str, int]]:
        """For either layout of w. A position beyond the shapes selects the last one."""
        most = MOST_ROWS // size
        shapes = [shapes_for(w_layout, SHAPES) for w_layout in W_LAYOUTS]
        return [
            each for one in shapes for each in capacity_dims(dims, most, one, ["shape"])
        ]

    few = Candidate(
        graph,
        serves=lambda dims: has_few_rows(dims["rows"], size),
        capacity=capacity,
        policy=choose,
    )
    return [few, many]


def capacity_dims(
    dims: Mapping[str, int],
    most: int,
    shapes: Sequence[TileShape],
    names: Sequence[str],
) -> list[Mapping[str, int]]:
    """The calls up to `most` rows that need the most memory: the queues of a dynamic
    plan are longest for the smallest tiles, and MOST_ROWS whole rows need more than the
    pieces of fewer rows. names: the dims that select tile shapes, by position in
    `shapes`."""
    areas = [shape.rows * shape.columns for shape in shapes]
    smallest = areas.index(min(areas))
    rows = max(most, dims["rows"])
    return [{**dims, "rows": rows, **dict.fromkeys(names, smallest)}]


class RowBlocks:
    """All ranks' rows of a graph in blocks, with one event for each block: see BLOCK.
    On one rank they are a single block if BLOCKS_IN_ONE could hold them. most: the most
    rows of a block otherwise, a multiple of BLOCK_UNIT."""

    def __init__(self, g: Graph, tokens: Expr, most: int = BLOCK) -> None:
        self.g, self.tokens = g, tokens
        count = ceildiv(tokens, most)
        if g.world_size == 1:
            most *= BLOCKS_IN_ONE
            count = select(equal((tokens - 1) // most, 0), 1, count)
        self.count = g.let("blocks", count)
        units = ceildiv(tokens, self.count * BLOCK_UNIT)
        self.block = g.let("block_rows", minimum(most, BLOCK_UNIT * units))

    def rows(self, i: Expr) -> Expr:
        """The rows of block i."""
        return minimum(self.block, self.tokens - i * self.block)

    def tiles(
        self,
        name: str,
        shape: Expr,
        shapes: Sequence[TileShape],
        w_layout: str = "nk",
    ) -> Tiles:
        """The tiles of a matmul, which divide the rows of a block evenly."""
        rows = minimum(self.tokens, self.block)
        return Tiles(self.g, name, shape, shapes, rows, w_layout, self.count)

    def gather(self, x: Tensor) -> tuple[Tensor, EventTensor | None]:
        """Push this rank's rows of x [rows, k] to all ranks. Returns all ranks' rows
        [tokens, k], and the events of their blocks. On one rank x itself, and None."""
        g, (rows, k), world = self.g, x.shape, self.g.world_size
        if world == 1:
            return x, None
        all_x = g.symmetric("all_x", (self.tokens, k), x.dtype)
        width = self._pushed("pushed", k)
        pieces = g.let("pushes", ceildiv(k, width))
        arrived = g.events(
            "arrived",
            (self.count,),
            expects=lambda i: self.rows(i) * pieces,
            cross_rank=True,
        )
        p, r, c = grid = g.grid(p=world, r=rows, c=pieces)
        to, row = (g.rank + (world - 1) - p) % world, g.rank * rows + r
        g.call(
            push_rows(),
            grid,
            reads=[x[span(r, 1), tile(c, width)]],
            writes=[all_x.on(to)[span(row, 1), tile(c, width)]],
            notifies=[arrived.on(to)[row // self.block]],
        )
        return all_x, arrived

    def multiply(
        self,
        name: str,
        tiles: Tiles,
        function: DeviceFunction,
        operands: tuple[Tensor, Sequence[Tensor], Tensor],
        width: Expr,
        waits: EventTensor | None,
        notifies: str | None = None,
    ) -> EventTensor | None:
        """Add a GEMM of x and weights into y, with `width` rows of each weight in a
        tile. waits: the events of the blocks of x. notifies: the name of new events,
        one per block of y, which are returned."""
        g, (x, weights, y) = self.g, operands
        shape = self.tokens, y.shape[1]
        of_task = tile_grid(g, f"{name}_", shape, tiles.rows, width)
        complete = None
        if notifies is not None:
            complete = g.events(
                notifies,
                (self.count,),
                expects=lambda i: of_task.across * ceildiv(self.rows(i), tiles.rows),
            )
        block = of_task.rows.start // self.block

        def of(events: EventTensor | None) -> list[EventRef]:
            return [] if events is None else [events[block]]

        g.call(
            function,
            of_task.grid,
            name=f"{name}_projection",
            reads=[
                x[of_task.rows, :],
                *(tiles.weight_tile(w, of_task.columns) for w in weights),
            ],
            writes=[y[of_task.rows, of_task.columns]],
            waits=of(waits),
            notifies=of(complete),
            order=of_task.order,
            values=tiles.values,
        )
        return complete

    def multiply_and_return(
        self,
        name: str,
        tiles: Tiles,
        operands: tuple[Tensor, Tensor, Tensor],
        waits: EventTensor | None,
        summed: int = SUMMED,
    ) -> None:
        """Add the GEMM of x [tokens, k] and w [n, k], summed over the ranks. y [rows,
        n] gets this rank's rows of the sum. On one rank nothing is summed or sent."""
        g, (x, w, y) = self.g, operands
        function, width = tiles.matmul(y.dtype), tiles.columns
        if g.world_size == 1:
            self.multiply(name, tiles, function, (x, [w], y), width, waits)
            return
        product = g.local("product", (self.tokens, y.shape[1]), y.dtype)
        given = (x, [w], product), width, waits
        produced = self.multiply(name, tiles, function, *given, "produced")
        assert produced is not None  # it has a name
        self._send_back(product, produced, y, summed)

    def _width(self, name: str, most: int, few: Expr | int, many: Expr | int) -> Expr:
        """The columns of a row in one task, as a number of the graph: `few` for up to
        `most` rows of all ranks, else `many`."""
        are_few = equal((self.tokens - 1) // most, 0)
        return self.g.let(f"{name}_columns", select(are_few, few, many))

    def _pushed(self, name: str, columns: Expr) -> Expr:
        """The columns of a row that one task pushes."""
        few = PUSHED * ceildiv(columns, PIECES * PUSHED)
        return self._width(name, PUSHED_FEW, few, columns)

    def _send_back(
        self, product: Tensor, produced: EventTensor, y: Tensor, summed: int
    ) -> None:
        """Send the rows of product [tokens, n] to their owners, which add those of all
        ranks into y [rows, n], in rank order."""
        g, (rows, n), world = self.g, y.shape, self.g.world_size
        parts = g.symmetric("parts", (world, rows, n), y.dtype)
        width = self._pushed("sent", n)
        pieces = g.let("sends", ceildiv(n, width))
        returned = g.events(
            "returned", (rows,), expects=world * pieces, cross_rank=True
        )
        # A rank's own rows come last: they need no transfer.
        p, r, c = grid = g.grid(p=world, r=rows, c=pieces)
        owner = (g.rank + 1 + p) % world
        row = owner * rows + r
        g.call(
            push_rows(),
            grid,
            name="send_back",
            reads=[product[span(row, 1), tile(c, width)]],
            writes=[parts.on(owner)[g.rank, span(r, 1), tile(c, width)]],
            waits=[produced[row // self.block]],
            notifies=[returned.on(owner)[r]],
        )
        width = self._width("summed", SUMMED_FEW, summed // 2, summed)
        r, c = grid = g.grid(r=rows, c=g.let("pieces", ceildiv(n, width)))
        of_piece = span(r, 1), tile(c, width)
        g.call(
            sum_ranks(y.dtype),
            grid,
            reads=[parts[:, *of_piece]],
            writes=[y[of_piece]],
            waits=[returned[r]],
        )
