"""GEMMs with few rows on several ranks: rows are gathered before they are multiplied,
and returned to their owners afterwards. The number of rows selects the tiles."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from etc_dist.functions.push_rows import push_rows
from etc_dist.functions.scaled_weights import ScaledTensor
from etc_dist.functions.sum_ranks import sum_ranks
from etc_dist.functions.tile_matmul import Tiles, TileShape, shapes_for
from etc_dist.ir import (
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
from etc_dist.ops.multiply import RowEvents, TiledMatmul
from etc_dist.ops.operation import Candidate
from etc_dist.ops.tile_model import FAMILY, choose, dims_of, largest_tilings
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
MOST_ROWS = 512
"""The most rows, over all ranks, that are gathered first; more are multiplied as they
arrive. By simulated runs of both (`predict/`), on two and four GPUs: not measured."""


def has_few_rows(rows: int, world_size: int, most: int = MOST_ROWS) -> bool:
    """Whether `rows` of each rank are few: at most `most` on all ranks."""
    return rows * world_size <= most


def with_few_rows(
    graph: Callable[..., GraphFunction],
    many: Candidate,
    world: World,
    deterministic: str,
) -> list[Candidate]:
    """The candidates of a GEMM of x [rows, k] and w [n, k] or [k, n]: `graph`, with the
    dims of a tiling, for few rows, and `many`. Only `many` on several hosts, and if it
    has options such as a tile size."""
    size, in_order = world.size, deterministic == BATCH
    if world.hosts.count > 1 or many.options:
        return [many]

    def choose_tiles(
        tuning: Tuning, w_layout: str, dims: Mapping[str, int], workers: int
    ) -> list[Choice]:
        return choose(
            (size * dims["rows"], dims["n"], dims["k"]),
            workers,
            shapes_for(w_layout, FAMILY),
            tuning,
            in_order=in_order,
            w_layout=w_layout,
        )

    def capacity(
        w_layout: str, dims: Mapping[str, int], workers: int
    ) -> list[Mapping[str, int]]:
        shapes, most = shapes_for(w_layout, FAMILY), MOST_ROWS // size
        return capacity_dims(dims, most, shapes, workers, size, [""], in_order=in_order)

    few = Candidate(
        graph,
        serves=lambda dims: has_few_rows(dims["rows"], size),
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
    g: Graph, x: Tensor, tokens: Expr, block: Expr
) -> tuple[Tensor, RowEvents | None]:
    """Push this rank's rows of x [rows, k] to all ranks. Returns all ranks' rows
    [tokens, k], and the events of their blocks of `block` rows. On one rank x itself,
    and None."""
    (rows, k), world = x.shape, g.world_size
    if world == 1:
        return x, None
    all_x = g.symmetric("all_x", (tokens, k), x.dtype)
    width = _pushed(g, "pushed", tokens, k)
    pieces = g.let("pushes", ceildiv(k, width))
    arrived = g.events(
        "arrived",
        (g.let("arrived_blocks", ceildiv(tokens, block)),),
        expects=lambda i: minimum(block, tokens - i * block) * pieces,
        cross_rank=True,
    )
    p, r, c = grid = g.grid(p=world, r=rows, c=pieces)
    to, row = (g.rank + (world - 1) - p) % world, g.rank * rows + r
    g.call(
        push_rows(),
        grid,
        reads=[x[span(r, 1), tile(c, width)]],
        writes=[all_x.on(to)[span(row, 1), tile(c, width)]],
        notifies=[arrived.on(to)[row // block]],
    )
    return all_x, RowEvents(arrived, block)


def multiply_and_return(
    g: Graph,
    name: str,
    tiles: Tiles,
    operands: tuple[Tensor | ScaledTensor, Tensor | ScaledTensor, Tensor],
    waits: RowEvents | None = None,
    summed: int = SUMMED,
) -> None:
    """Add the GEMM of x [tokens, k] and w [n, k], summed over the ranks: a TiledMatmul.
    y [rows, n] gets this rank's rows of the sum. On one rank nothing is summed or sent.
    waits: the events of blocks of rows of x."""
    x, w, y = operands
    if g.world_size == 1:
        TiledMatmul(g, name, tiles, y.dtype, x, [w], y).add(waits)
        return
    product = g.local("product", (x.shape[0], y.shape[1]), y.dtype)
    matmul = TiledMatmul(g, name, tiles, y.dtype, x, [w], product)
    produced = matmul.complete("produced", tiles.rows)
    matmul.add(waits)
    _send_back(g, product, produced, y, summed)


def _width(
    g: Graph, name: str, tokens: Expr, most: int, few: Expr | int, many: Expr | int
) -> Expr:
    """The columns of a row in one task, as a number of the graph: `few` for up to
    `most` rows of all ranks, else `many`."""
    are_few = equal((tokens - 1) // most, 0)
    return g.let(f"{name}_columns", select(are_few, few, many))


def _pushed(g: Graph, name: str, tokens: Expr, columns: Expr) -> Expr:
    """The columns of a row that one task pushes."""
    few = PUSHED * ceildiv(columns, PIECES * PUSHED)
    return _width(g, name, tokens, PUSHED_FEW, few, columns)


def _send_back(
    g: Graph, product: Tensor, produced: RowEvents, y: Tensor, summed: int
) -> None:
    """Send the rows of product [tokens, n] to their owners, which add those of all
    ranks into y [rows, n], in rank order."""
    (tokens, n), rows, world = product.shape, y.shape[0], g.world_size
    partials = g.symmetric("partials", (world, rows, n), y.dtype)
    width = _pushed(g, "sent", tokens, n)
    pieces = g.let("sends", ceildiv(n, width))
    returned = g.events("returned", (rows,), expects=world * pieces, cross_rank=True)
    # A rank's own rows come last: they need no transfer.
    p, r, c = grid = g.grid(p=world, r=rows, c=pieces)
    owner = (g.rank + 1 + p) % world
    row = owner * rows + r
    g.call(
        push_rows(),
        grid,
        name="send_back",
        reads=[product[span(row, 1), tile(c, width)]],
        writes=[partials.on(owner)[g.rank, span(r, 1), tile(c, width)]],
        waits=[produced.at(row)],
        notifies=[returned.on(owner)[r]],
    )
    width = _width(g, "summed", tokens, SUMMED_FEW, summed // 2, summed)
    r, c = grid = g.grid(r=rows, c=g.let("pieces", ceildiv(n, width)))
    of_piece = span(r, 1), tile(c, width)
    g.call(
        sum_ranks(y.dtype),
        grid,
        reads=[partials[:, *of_piece]],
        writes=[y[of_piece]],
        waits=[returned[r]],
    )
