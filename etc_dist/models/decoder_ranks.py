"""What the ranks of a decoder's step send to each other.

Each rank stores its part of a sum on all ranks, and each adds the parts in rank order,
so that all have the same bits. The two sums of a layer have separate buffers. A rank
overwrites a buffer only after the other sum, to which every rank contributes only after
it has read the first buffer. So no further event is needed."""

from __future__ import annotations

from collections.abc import Sequence

from etc_dist.functions.best_column import best_on_rank
from etc_dist.functions.push_rows import push_rows
from etc_dist.ir import EventRef, Expr, Graph, Tensor, span
from etc_dist.ir.function import TENSOR


def buffers_of_sums(
    g: Graph, names: Sequence[str], shape: tuple[Expr, ...], dtype: str
) -> dict[str, Tensor]:
    """Buffers for the results of matmuls `names`, before they are added to the
    residual: one for all on a single rank, else [ranks, *shape] for each."""
    if g.world_size == 1:
        return dict.fromkeys(names, g.local("delta", shape, dtype))
    parts: tuple[Expr | int, ...] = (g.world_size, *shape)
    return {name: g.symmetric(f"{name}_parts", parts, dtype) for name in names}


def rows_of_ranks(
    g: Graph,
    part: Tensor,
    rows: Expr,
    steps: Expr | int,
    step: Expr | int,
    wait: EventRef,
) -> tuple[Tensor, EventRef]:
    """The first `rows` rows of `part` [rows, columns] of all ranks, side by side in
    rank order, and the event of their arrival in `step`. The next step overwrites them.
    It begins only after results of all ranks that depend on them."""
    columns = part.shape[1]
    shape = rows, g.world_size * columns
    all_parts = g.symmetric(f"rank_{part.name}", shape, part.dtype)
    name, expects = f"{part.name}_arrived", rows * g.world_size
    arrival_events = g.events(name, (steps,), expects=expects, cross_rank=True)
    r, d = grid = g.grid(r=rows, d=g.world_size)
    to = (g.rank + 1 + d) % g.world_size
    g.call(
        push_rows(TENSOR),
        grid,
        name=f"push_{part.name}",
        reads=[part[span(r, 1), :]],
        writes=[all_parts.on(to)[span(r, 1), span(g.rank * columns, columns)]],
        waits=[wait],
        notifies=[arrival_events.on(to)[step]],
    )
    return all_parts, arrival_events[step]


def best_of_ranks(
    g: Graph,
    of_tiles: tuple[Tensor, Tensor],
    tile_columns: int,
    columns: Expr,
    steps: Expr | int,
    step: Expr | int,
    wait: EventRef,
) -> tuple[Tensor, Tensor, EventRef]:
    """The largest number of each row on each rank, fp32 [rows, ranks]; its column among
    those of all ranks, int32 [rows, ranks]; and the event of their arrival in `step`.

    of_tiles: the same two of this rank's tiles of `tile_columns`, [rows, tiles].
    columns: those of one rank."""
    values, ids = of_tiles
    shape = values.shape[0], g.world_size
    first = g.let("first_column", g.rank * columns)
    best = g.symmetric("rank_values", shape, "float32")
    best_ids = g.symmetric("rank_ids", shape, "int32")
    arrival_events = g.events("picked", (steps,), expects=g.world_size, cross_rank=True)
    (d,) = grid = g.grid(d=g.world_size)
    to = (g.rank + 1 + d) % g.world_size
    g.call(
        best_on_rank(tile_columns),
        grid,
        reads=[values[:, :], ids[:, :]],
        writes=[best.on(to)[:, g.rank], best_ids.on(to)[:, g.rank]],
        waits=[wait],
        notifies=[arrival_events.on(to)[step]],
        values={"first": first},
    )
    return best, best_ids, arrival_events[step]
