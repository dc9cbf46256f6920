"""GEMMs with few rows on several ranks: rows are gathered before they are multiplied,
and returned to their owners afterwards. The number of rows selects the tiles."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from etc_dist.functions.push_rows import push_rows
from etc_dist.functions.push_tile import push_tile
from etc_dist.functions.scaled_weights import BLOCK, ScaledTensor
from etc_dist.functions.sum_ranks import sum_ranks
from etc_dist.functions.tile_matmul import Tiles
from etc_dist.functions.tile_shape import TileShape, shapes_for
from etc_dist.ir import (
    EventRef,
    Expr,
    Graph,
    GraphFunction,
    Tensor,
    ceildiv,
    equal,
    maximum,
    minimum,
    select,
    span,
    tile,
)
from etc_dist.ir.expr import Comparison
from etc_dist.ir.tensor import Tile
from etc_dist.ops.deterministic import BATCH
from etc_dist.ops.multiply import RowEvents, TiledMatmul
from etc_dist.ops.operation import Candidate
from etc_dist.ops.quantized_rows import (
    Rows,
    gathered_tensors,
    push_of,
    row_tensors,
)
from etc_dist.ops.tile_model import FAMILY, choose, dims_of, largest_tilings
from etc_dist.ops.tuning import Tuning
from etc_dist.schedule.plan import Choice
from etc_dist.world import World

FEW, SUMMED = 128, 512
"""With up to FEW rows on all ranks, whole rows are returned once they are computed, and
a warp adds SUMMED columns of one. With more, strips of columns are: measured."""
LEAST_SENT, MOST_SENT, SENDS, SENT_WORK = 2048, 4096, 1024, 9_200_000
"""Elements of a strip that a warp sends, or adds: within these limits, so many that
there are SENDS tasks, and that the two warps of a worker send and add a half of the
result in the time of the matmul. Both take about 8 us for 2048 elements, and 11 us for
4096. As for `PACKET_BYTES` of return_rows.py, few bytes are to be in flight."""
PUSHED = 2048
"""Columns of a row that one warp pushes, which it loads at once, with up to PUSHED_FEW
rows on all ranks; or a multiple of them, so that a row has at most PIECES pieces. With
more rows a warp pushes whole ones: at 128 rows, dividing them was slower."""
PUSHED_FEW, PIECES = 32, 4
MOST_ROWS = 512
"""The most rows, over all ranks, that are gathered first; more are multiplied as they
arrive. By simulated runs of both (`predict/`), on two and four GPUs: not measured."""
MOST_RETURNED = 1536
"""The same of rows that are returned. More are multiplied owner by owner. Of simulated
runs at random sizes, both take equally long at 1600 to 2200 rows."""


def has_few_rows(rows: int, world_size: int, most: int = MOST_ROWS) -> bool:
    """Whether `rows` of each rank are few: at most `most` on all ranks."""
    return rows * world_size <= most


def with_few_rows(
    graph: Callable[..., GraphFunction],
    many: Candidate,
    world: World,
    deterministic: str,
    most: int = MOST_ROWS,
    *,
    shapes: Sequence[TileShape] = FAMILY,
) -> list[Candidate]:
    """The candidates of a GEMM of x [rows, k] and w [n, k] or [k, n]: `graph`, with the
    dims of a tiling of `shapes`, for up to `most` rows of all ranks, and `many`. Only
    `many` on several hosts, and if it has options such as a tile size."""
    size, in_order = world.size, deterministic == BATCH
    if world.hosts.count > 1 or many.options:
        return [many]

    def choose_tiles(
        tuning: Tuning, w_layout: str, dims: Mapping[str, int], workers: int
    ) -> list[Choice]:
        return choose(
            (size * dims["rows"], dims["n"], dims["k"]),
            workers,
            shapes_for(w_layout, shapes),
            tuning,
            in_order=in_order,
            w_layout=w_layout,
        )

    def capacity(
        w_layout: str, dims: Mapping[str, int], workers: int
    ) -> list[Mapping[str, int]]:
        all_shapes, own_rows = shapes_for(w_layout, shapes), most // size
        return capacity_dims(
            dims, own_rows, all_shapes, workers, size, [""], in_order=in_order
        )

    few = Candidate(
        partial(graph, shapes=shapes),
        serves=lambda dims: has_few_rows(dims["rows"], size, most),
        capacity=capacity,
        policy=choose_tiles,
    )
    return [few, many]


def capacity_dims(
    dims: Mapping[str, int],
    most: int,
    shapes: Sequence[TileShape],
    workers: int,
    world_size: int,
    names: Sequence[str],
    *,
    in_order: bool = False,
) -> list[Mapping[str, int]]:
    """The calls up to `most` rows that need the most memory. names: how the names of
    the dims of each matmul's tiles begin. in_order: without parts of k."""
    rows = max(most, dims["rows"])
    return [
        {**dims, "rows": rows}
        | {dim: n for name in names for dim, n in dims_of(tiling, name).items()}
        for tiling in largest_tilings(
            shapes, workers, world_size * rows, in_order=in_order
        )
    ]


def gather_rows(
    g: Graph, x: Rows, tokens: Expr, block: Expr, waits: RowEvents | None
) -> tuple[Rows, RowEvents | None]:
    """Push this rank's rows of x [rows, k] to all ranks. Returns all ranks' rows
    [tokens, k], and the events of their blocks of `block` rows. On one rank x itself,
    and `waits`, the events of its rows."""
    tensors, world = row_tensors(x), g.world_size
    rows, k = tensors[0].shape
    if world == 1:
        return x, waits
    all_x = gathered_tensors(g, "all_x", (tokens,), x)
    width = _pushed(g, "pushed", tokens, k)
    num_pieces = g.let("pushes", ceildiv(k, width))
    row_events = g.events(
        "arrived",
        (g.let("arrived_blocks", ceildiv(tokens, block)),),
        expects=lambda i: minimum(block, tokens - i * block) * num_pieces,
        cross_rank=True,
    )
    p, r, c = grid = g.grid(p=world, r=rows, c=num_pieces)
    to, row = (g.rank + (world - 1) - p) % world, g.rank * rows + r
    # Pieces of rows in float8 have whole groups, unless they are rows.
    pieces = [tile(c, width), tile(c, ceildiv(width, BLOCK))]
    pairs = [*zip(tensors, row_tensors(all_x), pieces, strict=False)]
    g.call(
        push_of(x),
        grid,
        reads=[tensor[span(r, 1), piece] for tensor, _, piece in pairs],
        writes=[whole.on(to)[span(row, 1), piece] for _, whole, piece in pairs],
        waits=[] if waits is None else [waits.at(r)],
        notifies=[row_events.on(to)[row // block]],
    )
    return all_x, RowEvents(row_events, block)


def multiply_and_return(
    g: Graph,
    name: str,
    tiles: Tiles,
    operands: tuple[Tensor | ScaledTensor, Tensor | ScaledTensor, Tensor],
    waits: RowEvents | None = None,
    few: int = FEW,
) -> None:
    """Add the GEMM of x [tokens, k] and w [n, k], summed over the ranks: a TiledMatmul.
    y [rows, n] gets this rank's rows of the sum. On one rank nothing is summed or sent.
    waits: the events of blocks of rows of x. few: up to so many tokens, whole rows are
    returned."""
    x, w, y = operands
    if g.world_size == 1:
        TiledMatmul(g, name, tiles, y.dtype, x, [w], y).add(waits)
        return
    product = g.local("product", (x.shape[0], y.shape[1]), y.dtype)
    matmul = TiledMatmul(g, name, tiles, y.dtype, x, [w], product)
    tokens, rows = x.shape[0], y.shape[0]
    few_rows = g.let("few_rows", select(equal((tokens - 1) // few, 0), rows, 0))
    are_few = equal(few_rows, rows)
    strip = g.let("strip_tiles", select(are_few, matmul.across, matmul.strip))
    produced = matmul.complete_strips("produced", strip)
    matmul.add(waits)
    width = _pushed(g, "sent", tokens, y.shape[1])
    sums = ReturnedSums(g, product, produced, y, are_few, width)
    sums.add_rows(few_rows)
    width = g.let("strip_columns", matmul.columns * strip)
    elements = sent_elements(SENT_WORK, x.shape[1], y.shape)
    sums.add_strips(g.let("many_rows", rows - few_rows), width, elements)


def sent_elements(work: int, k: Expr, shape: Sequence[Expr]) -> Expr:
    """The elements that a warp sends at once, or adds, while a matmul over k runs.
    work: as SENT_WORK. shape: that of what is sent."""
    rows, columns = shape
    most = minimum(work // 8 // k, rows * columns // (8 * SENDS))
    return 8 * minimum(MOST_SENT // 8, maximum(LEAST_SENT // 8, most))


def _pushed(g: Graph, name: str, tokens: Expr, columns: Expr) -> Expr:
    """The columns of a row that one task pushes, as a number of the graph."""
    are_few = equal((tokens - 1) // PUSHED_FEW, 0)
    few = PUSHED * ceildiv(columns, PIECES * PUSHED)
    return g.let(f"{name}_columns", select(are_few, few, columns))


class ReturnedSums:
    """Partial sums `product` [tokens, n] of the rows of all ranks, which are sent to
    their owners. These add those of all ranks into y [rows, n], in rank order.
    produced: the events of blocks of rows and strips of product. are_few: whether whole
    rows are sent, in pieces of `width` columns."""

    def __init__(
        self,
        g: Graph,
        product: Tensor,
        produced: RowEvents,
        y: Tensor,
        are_few: Comparison,
        width: Expr,
    ) -> None:
        self._g, self._product, self._produced, self._y = g, product, produced, y
        (rows, n), world = y.shape, g.world_size
        self._partials = g.symmetric("partials", (world, rows, n), y.dtype)
        self._width, self._pieces = width, g.let("sends", ceildiv(n, width))
        # Of packets, each has the event of its first row.
        self._return_events = g.events(
            "returned",
            (rows, produced.events.shape[-1]),
            expects=select(are_few, world * self._pieces, world - 1),
            cross_rank=True,
        )

    def add_rows(self, rows: Expr) -> None:
        """Send whole rows, each once it is computed. rows: of a rank, or 0."""
        g, n, y, width = self._g, self._product.shape[1], self._y, self._width
        world, pieces, return_events = g.world_size, self._pieces, self._return_events
        # A rank's own rows come last: they need no transfer.
        p, r, c = grid = g.grid(p=world, r=rows, c=pieces)
        owner = (g.rank + 1 + p) % world
        row = owner * y.shape[0] + r
        g.call(
            push_rows(),
            grid,
            name="send_rows",
            reads=[self._product[span(row, 1), tile(c, width)]],
            writes=[self._partials.on(owner)[g.rank, span(r, 1), tile(c, width)]],
            waits=[self._produced.at(row)],
            notifies=[return_events.on(owner)[r, 0]],
        )
        r, c = grid = g.grid(r=rows, c=g.let("pieces", ceildiv(n, SUMMED)))
        of_piece = span(r, 1), tile(c, SUMMED)
        g.call(
            sum_ranks(y.dtype),
            grid,
            name="sum_rows",
            reads=[self._partials[:, *of_piece]],
            writes=[y[of_piece]],
            waits=[return_events[r, 0]],
        )

    def add_strips(self, rows: Expr, width: Expr, elements: Expr) -> None:
        """Send strips of `width` columns, some rows with about `elements` of them at
        once. rows: of a rank, or 0."""
        g, produced, y = self._g, self._produced, self._y
        world, n = g.world_size, y.shape[1]
        most = maximum(1, elements // minimum(n, width))
        packet = minimum(maximum(1, rows), minimum(produced.rows, most))
        packet = g.let("packet_rows", packet)
        num_packets = g.let("packets", ceildiv(rows, packet))
        return_events, strips = self._return_events, self._return_events.shape[1]

        def place(q: Expr, s: Expr) -> tuple[Tile, Tile]:
            first = q * packet
            return span(first, minimum(packet, rows - first)), tile(s, width)

        def computed(first: Expr, size: Expr, s: Expr) -> list[EventRef]:
            """The events of a packet of product, which may be in two blocks."""
            last, height = first + size - 1, produced.rows
            is_in_two = first // height < last // height
            return [
                produced.of_strip(first, s),
                produced.of_strip(last, s).when(is_in_two),
            ]

        s, p, q = grid = g.grid(strip=strips, peer=world - 1, packet=num_packets)
        owner, (own_rows, columns) = (g.rank + 1 + p) % world, place(q, s)
        first = owner * rows + own_rows.start
        g.call(
            push_tile(y.dtype),
            grid,
            name="send_strips",
            reads=[self._product[span(first, own_rows.size), columns]],
            writes=[self._partials.on(owner)[g.rank, own_rows, columns]],
            waits=computed(first, own_rows.size, s),
            notifies=[return_events.on(owner)[q * packet, s]],
        )
        s, q = grid = g.grid(strip_of_sum=strips, packet_of_sum=num_packets)
        own_rows, columns = place(q, s)
        first = g.rank * rows + own_rows.start
        g.call(
            sum_ranks(y.dtype, has_own=True),
            grid,
            name="sum_strips",
            reads=[
                self._partials[:, own_rows, columns],
                self._product[span(first, own_rows.size), columns],
            ],
            writes=[y[own_rows, columns]],
            waits=[return_events[q * packet, s], *computed(first, own_rows.size, s)],
        )
