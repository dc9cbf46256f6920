"""What the ranks of a decoder's step send to each other.

Each rank stores its part of a sum on all ranks, and each adds the parts in rank order,
so that all have the same bits. The two sums of a layer have separate buffers. A rank
overwrites a buffer only after the other sum, to which every rank contributes only after
it has read the first buffer. So no further event is needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from etc_dist.functions.best_column import best_on_rank
from etc_dist.functions.epilogue import Epilogue, store, store_on_ranks
from etc_dist.functions.push_rows import push_rows
from etc_dist.ir import EventRef, EventTensor, Expr, Graph, Region, Tensor, span
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


def other_ranks(g: Graph) -> list[Expr]:
    """The peers, the next rank first."""
    return [(g.rank + n) % g.world_size for n in range(1, g.world_size)]


@dataclass(frozen=True)
class TilePlaces:
    """Where the tiles of a matmul are stored: in y, or if y [ranks, ...] is symmetric,
    in this rank's part of y on every rank. rows: of the matmul; y may have more. first:
    the row of y that is the first one, on this rank alone."""

    g: Graph
    y: Tensor
    rows: Expr
    first: Expr | int = 0

    @property
    def shape(self) -> tuple[Expr, Expr]:
        """The rows and columns of the matmul."""
        return self.rows, self.y.shape[-1]

    @property
    def peers(self) -> list[Expr]:
        """The ranks that get the results, too."""
        return other_ranks(self.g) if self.y.kind == "symmetric" else []

    @property
    def epilogue(self) -> Epilogue:
        """The epilogue that stores tiles in all places."""
        return store_on_ranks(1 + len(self.peers)) if self.peers else store

    def regions(self, rows: Any, columns: Any) -> list[Region]:
        """What the epilogue writes: y, and the same part on peers."""
        if not self.peers:
            return [self.y[span(self.first + rows.start, rows.size), columns]]
        own_index = self.g.rank, rows, columns
        return [self.y[own_index], *(self.y.on(peer)[own_index] for peer in self.peers)]

    def events(self, name: str, shape: Sequence[Expr], tiles: Expr) -> EventTensor:
        """An element is met once each rank that stores into y has stored `tiles`."""
        expects = tiles * (1 + len(self.peers)) if self.peers else tiles
        is_sent = bool(self.peers)
        return self.g.events(name, shape, expects=expects, cross_rank=is_sent)

    def elements(self, events: EventTensor, turn: tuple[Expr, ...]) -> list[EventRef]:
        """The events of `turn` on this rank and on peers."""
        return [events[turn], *(events.on(peer)[turn] for peer in self.peers)]


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
