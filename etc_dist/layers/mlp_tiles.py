"""The graph of the dense MLP in which every rank computes the rows of all ranks, on
tiles of the shapes that suit their number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from etc_dist.functions.epilogue import swiglu
from etc_dist.functions.push_rows import push_rows
from etc_dist.functions.sum_ranks import sum_ranks
from etc_dist.functions.tile_matmul import Tiles, TileShape
from etc_dist.ir import (
    DeviceFunction,
    EventRef,
    EventTensor,
    Expr,
    Graph,
    Tensor,
    ceildiv,
    graph_function,
    minimum,
    span,
    tile,
)
from etc_dist.layers.mlp_steps import add_tensors
from etc_dist.ops.matmul_policy import SHAPES, explained
from etc_dist.ops.order import tile_grid
from etc_dist.ops.tuning import Tuning
from etc_dist.schedule.plan import Choice

BLOCK = 256
"""Rows that one event stands for: a multiple of the rows of every tile."""
SUMMED = 1024
"""Columns of a row whose partial sums one warp adds."""


@graph_function
def mlp_tiles_graph(
    g: Graph,
    *,
    dtype: str = "bfloat16",
    shapes: Sequence[TileShape] = SHAPES,
    block: int = BLOCK,
    summed: int = SUMMED,
) -> None:
    """x [rows, hidden] on each rank -> y [rows, hidden], the same rows.

    gate, up [inner, hidden] and down [hidden, inner] are a rank's shard of the weights.
    Every rank gathers the rows of all, multiplies them by gate and up into activations,
    and these by down. A row returns to its owner once all of its tiles are computed,
    and the owner adds the ranks' in fp32. A single rank reads x and writes y directly.

    The dims `gate_up_shape` and `down_shape` choose the tiles of the two products, by
    position in `shapes`.
    """
    x, y, (gate, up), down = add_tensors(g, dtype)
    (rows, hidden), (_, inner) = x.shape, down.shape
    gate_up_shape, down_shape = g.dims("gate_up_shape down_shape")
    tokens = g.let("tokens", g.world_size * rows)
    blocks = _Blocks(g, tokens, block)
    all_x, product, arrived = x, y, None
    if g.world_size > 1:
        all_x, arrived = _gather(g, x, blocks)
        product = g.local("product", (tokens, hidden), dtype)
    active = g.local("active", (tokens, inner), dtype)

    tiles = Tiles(g, "gate_up", gate_up_shape, shapes)
    activated = blocks.multiply(
        "gate_up",
        tiles,
        tiles.matmul(dtype, swiglu),
        (all_x, [gate, up], active),
        tiles.half_columns(),
        arrived,
        "activated",
    )
    tiles = Tiles(g, "down", down_shape, shapes)
    produced = blocks.multiply(
        "down",
        tiles,
        tiles.matmul(dtype),
        (active, [down], product),
        tiles.columns,
        activated,
        "produced" if g.world_size > 1 else None,
    )
    if produced is not None:
        _send_back(g, product, produced, y, blocks, summed)


class _Blocks:
    """The blocks of rows of a graph that events stand for."""

    def __init__(self, g: Graph, tokens: Expr, block: int) -> None:
        self.g, self.tokens, self.block = g, tokens, block
        self.count = g.let("blocks", ceildiv(tokens, block))

    def rows(self, i: Expr) -> Expr:
        """The rows of block i."""
        return minimum(self.block, self.tokens - i * self.block)

    def multiply(
        self,
        name: str,
        tiles: Tiles,
        function: DeviceFunction,
        operands: tuple[Tensor, Sequence[Tensor], Tensor],
        width: Expr,
        waits: EventTensor | None,
        notifies: str | None,
    ) -> EventTensor | None:
        """Add a product of x and weights, `width` rows of each a tile, into y: waits
        for the rows of x, and notifies new events once a block is complete."""
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
            reads=[x[of_task.rows, :], *(w[of_task.columns, :] for w in weights)],
            writes=[y[of_task.rows, of_task.columns]],
            waits=of(waits),
            notifies=of(complete),
            order=of_task.order,
            values=tiles.values,
        )
        return complete


def _gather(g: Graph, x: Tensor, blocks: _Blocks) -> tuple[Tensor, EventTensor]:
    """Push every rank's rows of x to all: all ranks' [tokens, hidden], and the events
    of its blocks."""
    (rows, hidden), world = x.shape, g.world_size
    all_x = g.symmetric("all_x", (blocks.tokens, hidden), x.dtype)
    arrived = g.events("arrived", (blocks.count,), expects=blocks.rows, cross_rank=True)
    p, r = grid = g.grid(p=world, r=rows)
    to, row = (g.rank + (world - 1) - p) % world, g.rank * rows + r
    g.call(
        push_rows(),
        grid,
        reads=[x[span(r, 1), :]],
        writes=[all_x.on(to)[span(row, 1), :]],
        notifies=[arrived.on(to)[row // blocks.block]],
    )
    return all_x, arrived


def _send_back(
    g: Graph,
    product: Tensor,
    produced: EventTensor,
    y: Tensor,
    blocks: _Blocks,
    summed: int,
) -> None:
    """Return the rows of product [tokens, hidden] to their owners, which add those of
    all ranks: y [rows, hidden]."""
    (rows, hidden), world = y.shape, g.world_size
    parts = g.symmetric("parts", (world, rows, hidden), y.dtype)
    returned = g.events("returned", (rows,), expects=world, cross_rank=True)
    # One's own come last: they do not have to travel.
    p, r = grid = g.grid(p=world, r=rows)
    owner = (g.rank + 1 + p) % world
    row = owner * rows + r
    g.call(
        push_rows(),
        grid,
        name="send_back",
        reads=[product[span(row, 1), :]],
        writes=[parts.on(owner)[g.rank, span(r, 1), :]],
        waits=[produced[row // blocks.block]],
        notifies=[returned.on(owner)[r]],
    )
    r, c = grid = g.grid(r=rows, c=g.let("pieces", ceildiv(hidden, summed)))
    of_piece = span(r, 1), tile(c, summed)
    g.call(
        sum_ranks(y.dtype),
        grid,
        reads=[parts[:, *of_piece]],
        writes=[y[of_piece]],
        waits=[returned[r]],
    )


def choose_shapes(
    dims: Mapping[str, int],
    world_size: int,
    workers: int,
    shapes: Sequence[TileShape],
    *,
    in_order: bool = False,
    tuning: Tuning,
) -> list[Choice]:
    """The dims that choose the tiles of a call."""
    tokens, hidden, inner = world_size * dims["rows"], dims["hidden"], dims["inner"]
    of_each = {
        "gate_up_shape": (2 * inner, hidden, True),
        "down_shape": (hidden, inner, False),
    }
    given = workers, shapes, tuning
    return [
        explained(name, (tokens, n, k), *given, gated=gated, in_order=in_order)
        for name, (n, k, gated) in of_each.items()
    ]


def capacity_dims(
    dims: Mapping[str, int], most: int, shapes: Sequence[TileShape]
) -> list[Mapping[str, int]]:
    """Calls that need the most memory of those up to `most` rows: a dynamic plan has
    queues, which are the longest for the smallest tiles."""
    areas = [shape.rows * shape.columns for shape in shapes]
    smallest = areas.index(min(areas))
    longest = {"gate_up_shape": smallest, "down_shape": smallest}
    return [{**dims, "rows": max(most, dims["rows"]), **longest}]
