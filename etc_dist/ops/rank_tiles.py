"""A matrix multiplication of the rows of all ranks, in which each tile has rows of one
rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from etc_dist.functions.epilogue import Epilogue, store
from etc_dist.functions.scaled_weights import ScaledTensor
from etc_dist.functions.tile_matmul import Tiles
from etc_dist.functions.tile_shape import TileShape, shapes_for
from etc_dist.ir import (
    EventTensor,
    Expr,
    Graph,
    GraphFunction,
    Tensor,
    ceildiv,
    equal,
    minimum,
    select,
)
from etc_dist.ir.call import Grid
from etc_dist.ir.expr import wrap
from etc_dist.ops.deterministic import BATCH
from etc_dist.ops.few_rows import capacity_dims
from etc_dist.ops.multiply import Matrix, RowEvents, TiledMatmul
from etc_dist.ops.operation import Candidate
from etc_dist.ops.tile_model import FAMILY, choose
from etc_dist.ops.tuning import Tuning
from etc_dist.schedule.plan import Choice
from etc_dist.world import World


class RankTiles(TiledMatmul):
    """A `TiledMatmul` of this rank's own rows; its method `multiply` adds the tiles of
    other ranks' rows. A block of rows is a tile's share of one rank's: `down` blocks of
    `height` rows, the last one shorter. Only own rows use split-K, so that no rank
    waits for the final sums of another one."""

    def __init__(
        self,
        g: Graph,
        name: str,
        tiles: Tiles,
        dtype: str,
        x: Matrix,
        weights: Sequence[Tensor | ScaledTensor],
        y: Matrix,
        epilogue: Epilogue = store,
        *,
        owners: int = 1,
    ) -> None:
        super().__init__(g, name, tiles, dtype, x, weights, y, epilogue, owners=owners)
        self.down, self.height = self._down, tiles.rows
        self.group = self._group
        """Blocks of rows of each owner whose tiles run together."""
        self.whole, self.split = self._whole, self._split
        """Columns of tiles, without and with split-K in own rows."""

    def complete_rows(
        self, name: str, ranks: int, rows: Expr, own_idx: Expr | int
    ) -> EventTensor:
        """New events [ranks, blocks] of blocks of `rows` rows, a multiple of `height`
        or all rows. own_idx: the place of own rows, whose last tasks notify them."""
        g, all_rows = self._g, self._y.shape[0]
        own_tasks = g.let(f"{name}_tasks", self.whole + self.split * self._slices)

        def tasks(rank: Expr, block: Expr) -> Expr:
            down = ceildiv(minimum(rows, all_rows - block * rows), self.height)
            return down * select(equal(rank, wrap(own_idx)), own_tasks, self.across)

        num_blocks = g.let(f"{name}_blocks", ceildiv(all_rows, rows))
        events = g.events(name, (ranks, num_blocks), expects=tasks)
        self._complete = RowEvents(events, rows, (own_idx,))
        return events

    def grid(self, ranks: Expr | int, columns: Expr) -> Grid:
        """A grid of the tiles of `ranks` ranks, of so many columns of tiles."""
        axes = [f"{self._name}{axis}" for axis in ("p", "row", "column")]
        sizes = wrap(ranks), self.down, columns
        return self._g.grid(**dict(zip(axes, sizes, strict=True)))


def rank_tiles_candidate(
    graph: Callable[..., GraphFunction],
    world: World,
    deterministic: str,
    sizes: Mapping[str, Any],
    *,
    shapes: Sequence[TileShape] = FAMILY,
    divides: bool = True,
) -> Candidate:
    """The candidate of a graph with the dims of one `RankTiles`, over any number of
    hosts. sizes: options of the graph. shapes: its tiles, if `sizes` has none. divides:
    whether they may use split-K."""

    in_order = deterministic == BATCH

    def capacity(
        w_layout: str, dims: Mapping[str, int], workers: int
    ) -> list[Mapping[str, int]]:
        """Fewer rows may need more memory for parts, which cannot grow in a capture."""
        all_shapes = shapes_for(w_layout, sizes.get("shapes", shapes))
        return capacity_dims(dims, 1, all_shapes, workers, 1, [""], in_order=in_order)

    def choose_tiles(
        tuning: Tuning, w_layout: str, dims: Mapping[str, int], workers: int
    ) -> list[Choice]:
        choices = choose(
            (world.size * dims["rows"], dims["n"], dims["k"]),
            workers,
            shapes_for(w_layout, sizes.get("shapes", shapes)),
            tuning,
            in_order=in_order,
            divides=divides,
            w_layout=w_layout,
            ranks=world.size,
        )
        return choices if divides else choices[:2]

    return Candidate(
        partial(graph, shapes=shapes),
        sizes,
        over_hosts=True,
        policy=choose_tiles,
        capacity=capacity if divides else None,
    )
