"""The graph of the dense MLP for so few rows that its weights' bytes take the time."""

from __future__ import annotations

from etc_dist.functions.add_partials import activate_partials, add_partials
from etc_dist.functions.grouped_matmul import MOST_ROWS, TILE_COLUMNS, grouped_float
from etc_dist.functions.matmul import STAGE_K
from etc_dist.functions.push_rows import push_rows
from etc_dist.ir import (
    EventTensor,
    Expr,
    Graph,
    Tensor,
    ceildiv,
    graph_function,
    maximum,
    minimum,
    span,
    tile,
)
from etc_dist.layers.mlp_steps import add_tensors

FEW_ROWS = 128
"""Rows of all ranks at most. Twice as many took as long as by the other program; more
than the 288 of a tile are refused by the proof of the graph."""
PRODUCT_TASKS = 64
"""Tasks of a product that read weights concurrently, about one for each cluster."""
MANY_ROWS = 17
"""Of fewer rows, a task has half as many columns, so that more workers read weights."""
BLOCK = 128
"""Columns of activations that one warp makes."""
SUMMED = 256
"""Columns of sums that one warp adds."""
PACKET_COLUMNS = 1024
"""Columns of a row that one warp pushes, of up to PARTED_ROWS rows a rank; of more it
pushes whole rows."""
PARTED_ROWS = 8
ROW_GROUPS = 16
"""About so many groups of rows are made into activations, or added, each by a warp."""


@graph_function
def mlp_few_rows_graph(
    g: Graph,
    *,
    dtype: str = "bfloat16",
    tile_columns: int = TILE_COLUMNS,
    step: int = 2 * STAGE_K,
    block: int = BLOCK,
    summed: int = SUMMED,
    product_tasks: int = PRODUCT_TASKS,
) -> None:
    """x [rows, hidden] on each rank -> y [rows, hidden], the same rows.

    As `mlp_graph`, but all rows are one tile, and each product is cut along k, too, so
    that all workers read weights: parts of gate's and up's product become activations,
    and parts of down's the sum that goes to the rows' owner, which adds the ranks'. All
    parts are fp32.

    The sizes are fixed on the GPU, where a task may have half of tile_columns, and free
    on the CPU backend, but that half of tile_columns is a multiple of block and of
    summed, and block one of step: what a narrow tile reads at once, which may reach
    past the end of k, but not into another share of it.
    """
    x, y, (gate, up), down = add_tensors(g, dtype)
    (rows, hidden), (_, inner) = x.shape, down.shape
    world = g.world_size
    tokens = g.let("tokens", world * rows)
    of_tile = span(0, minimum(MOST_ROWS, tokens))  # all of them
    columns = g.let(
        "task_columns", tile_columns // 2 * (1 + minimum(1, tokens // MANY_ROWS))
    )

    all_x = g.symmetric("all_x", (tokens, hidden), dtype)
    are_many = minimum(1, rows // (PARTED_ROWS + 1))
    packet = g.let("packet", maximum(PACKET_COLUMNS, are_many * hidden))
    packets = g.let("packets", ceildiv(hidden, packet))
    arrived = g.events("arrived", (1,), expects=world * rows * packets, cross_rank=True)
    p, i, q = grid = g.grid(p=world, i=rows, q=packets)
    to = (g.rank + (world - 1) - p) % world
    g.call(
        push_rows(),
        grid,
        reads=[x[span(i, 1), tile(q, packet)]],
        writes=[all_x.on(to)[span(g.rank * rows + i, 1), tile(q, packet)]],
        notifies=[arrived.on(to)[0]],
    )

    wide = g.let("wide", ceildiv(inner, columns))
    width, count = _shares(g, "up", hidden, step, 2 * wide, product_tasks)
    multiplied = g.events("multiplied", (wide,), expects=2 * count)
    parts = []
    for name, weight in ("gate", gate), ("up", up):
        part = g.local(f"{name}_parts", (count, tokens, inner), "float32")
        s, j = grid = g.grid(s=count, j=wide)
        share = span(s * width, minimum(width, hidden - s * width))
        g.call(
            grouped_float(dtype),
            grid,
            name=f"{name}_projection",
            reads=[all_x[of_tile, share], weight[tile(j, columns), share]],
            writes=[part[s, of_tile, tile(j, columns)]],
            waits=[arrived[0]],
            notifies=[multiplied[j]],
        )
        parts.append(part)

    across = g.let("across", ceildiv(hidden, columns))
    width, count = _shares(g, "down", inner, block, across, product_tasks)
    active = g.local("active", (tokens, inner), dtype)
    group = g.let("active_rows", maximum(2, tokens // ROW_GROUPS))
    groups = g.let("active_groups", ceildiv(tokens, group))
    blocks = g.let("blocks", ceildiv(inner, block))
    of_share = g.let("share_blocks", width // block)
    activated = g.events(
        "activated",
        (count,),
        expects=lambda s: groups * minimum(of_share, blocks - s * of_share),
    )
    i, b = grid = g.grid(i=groups, b=blocks)
    of_block = tile(i, group), tile(b, block)
    g.call(
        activate_partials(dtype),
        grid,
        reads=[part[:, *of_block] for part in parts],
        writes=[active[of_block]],
        waits=[multiplied[b * block // columns]],
        notifies=[activated[b // of_share]],
    )
    partial_sum = g.local("down_parts", (count, tokens, hidden), "float32")
    produced = g.events("produced", (across,), expects=count)
    s, j = grid = g.grid(s=count, j=across)
    share = span(s * width, minimum(width, inner - s * width))
    g.call(
        grouped_float(dtype),
        grid,
        name="down_projection",
        reads=[active[of_tile, share], down[tile(j, columns), share]],
        writes=[partial_sum[s, of_tile, tile(j, columns)]],
        waits=[activated[s]],
        notifies=[produced[j]],
    )
    _send_back(g, partial_sum, produced, columns, y, summed)


def _shares(
    g: Graph, name: str, depth: Expr, unit: int, tasks: Expr, wanted: int
) -> tuple[Expr, Expr]:
    """Into what shares of k a product is cut, of which each tile has as many tasks:
    their width, in whole units, and their number."""
    units = ceildiv(depth, unit)
    of_share = ceildiv(units, maximum(1, wanted // tasks))
    width = g.let(f"{name}_share", of_share * unit)
    return width, g.let(f"{name}_shares", ceildiv(units, of_share))


def _send_back(
    g: Graph,
    partial_sum: Tensor,
    produced: EventTensor,
    columns: Expr,
    y: Tensor,
    summed: int,
) -> None:
    """Add the sums over shares of partial_sum [shares, world * rows, hidden], each sent
    to the rows' owner, and those over ranks: y [rows, hidden]."""
    world, (rows, hidden) = g.world_size, y.shape
    group = g.let("sum_rows", maximum(1, rows // ROW_GROUPS))
    groups = g.let("sum_groups", ceildiv(rows, group))
    pieces = g.let("pieces", ceildiv(hidden, summed))
    sums = g.symmetric("sums", (world, rows, hidden), "float32")
    returned = g.events("returned", (groups, pieces), expects=world, cross_rank=True)
    # One's own come last: they do not have to travel.
    p, i, c = grid = g.grid(p=world, i=groups, c=pieces)
    owner, left = (g.rank + 1 + p) % world, minimum(group, rows - i * group)
    g.call(
        add_partials("float32"),
        grid,
        name="add_shares",
        reads=[partial_sum[:, span(owner * rows + i * group, left), tile(c, summed)]],
        writes=[sums.on(owner)[g.rank, span(i * group, left), tile(c, summed)]],
        waits=[produced[c * summed // columns]],
        notifies=[returned.on(owner)[i, c]],
    )
    i, c = grid = g.grid(i=groups, c=pieces)
    of_piece = tile(i, group), tile(c, summed)
    g.call(
        add_partials(y.dtype),
        grid,
        name="add_ranks",
        reads=[sums[:, *of_piece]],
        writes=[y[of_piece]],
        waits=[returned[i, c]],
    )
