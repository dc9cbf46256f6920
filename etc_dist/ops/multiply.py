"""A matrix multiplication in a graph, with split-K for the tiles of a wave that is not
full."""

from __future__ import annotations

from collections.abc import Sequence

from etc_dist.functions.epilogue import Epilogue, store
from etc_dist.functions.matmul import STAGE_K
from etc_dist.functions.tile_matmul import GROUP_WORDS, SLICE, SLICE_WORDS, Tiles
from etc_dist.ir import (
    Graph,
    Tensor,
    ceildiv,
    equal,
    minimum,
    select,
    span,
    tile,
)
from etc_dist.ops.order import ROW_GROUP, grouped_rows


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
    """y [m, n] = epilogue of x [m, k] and `weights`. The names of its numbers begin
    with `name`. `tiles` have the columns of a dim (`columns=`). Its value and those of
    the two dims here are chosen together: see `ops/tile_model.py`.

    The last `{name}split_tile_columns` columns of tiles use split-K, with
    `{name}parts` tasks for each tile. These tasks begin first, and store fp32 sums.
    Tasks that end the matmul add them, in the order of k."""
    (m, n), k, gated = y.shape, x.shape[1], epilogue.gated
    columns, values = tiles.half_columns() if gated else tiles.columns, tiles.values
    split, parts = g.dims(f"{name}split_tile_columns {name}parts")
    down = g.let(f"{name}tiles_down", ceildiv(m, tiles.rows))
    whole = g.let(f"{name}whole_tile_columns", ceildiv(n, columns) - split)
    part_boxes = g.let(
        f"{name}part_boxes",
        ceildiv(ceildiv(k, STAGE_K * tiles.k_boxes), parts) * tiles.k_boxes,
    )
    sums = g.local(f"{name}sums", (down, split, parts, tiles.part_words), "float32")
    stored = g.events(f"{name}parts_stored", (down, split), expects=parts)

    axes = [f"{name}{axis}" for axis in ("part", "part_row", "part_column")]
    p, i, j = grid = g.grid(**dict(zip(axes, (parts, down, split), strict=True)))
    k_span = tile(p, STAGE_K * part_boxes)
    g.call(
        tiles.matmul(dtype, epilogue, is_part=True),
        grid,
        reads=[
            x[tile(i, tiles.rows), k_span],
            *(tiles.weight_tile(w, tile(whole + j, columns), k_span) for w in weights),
        ],
        writes=[sums[i, j, p, :]],
        notifies=[stored[i, j]],
        values=values,
        name=f"{name}multiply_parts",
    )
    i, j = grid = g.grid(**{f"{name}row": down, f"{name}column": whole})
    g.call(
        tiles.matmul(dtype, epilogue),
        grid,
        reads=[
            x[tile(i, tiles.rows), :],
            *(tiles.weight_tile(w, tile(j, columns)) for w in weights),
        ],
        writes=[y[tile(i, tiles.rows), tile(j, columns)]],
        order=lambda t: grouped_rows(t, down, whole, ROW_GROUP),
        values=values,
        name=f"{name}tile_matmul",
    )
    # A task adds the parts of a slice of a tile: SLICE of its rows if swapped, else of
    # its columns.
    is_swapped = tiles.is_swapped
    size = is_swapped * tiles.rows + (1 - is_swapped) * columns
    slices = g.let(f"{name}slices", ceildiv(size, SLICE))
    axes = [f"{name}{axis}" for axis in ("sum_row", "sum_column", "slice")]
    i, j, s = grid = g.grid(**dict(zip(axes, (down, split, slices), strict=True)))
    slice_size = minimum(SLICE, size - s * SLICE)
    y_rows, y_columns = (
        span(
            tile_idx * tile_size + s * SLICE * is_sliced,
            select(equal(is_sliced, 1), slice_size, tile_size),
        )
        for tile_idx, tile_size, is_sliced in (
            (i, tiles.rows, is_swapped),
            (whole + j, columns, 1 - is_swapped),
        )
    )
    offsets = [s * SLICE_WORDS]
    if gated:
        # Up follows gate along the columns. If these are the M of wgmma, a slice has
        # the sums of both.
        up_words = (1 - is_swapped) * columns * (GROUP_WORDS // 8)
        offsets += [s * SLICE_WORDS + up_words]
    g.call(
        tiles.sum_parts(dtype, epilogue),
        grid,
        reads=[sums[i, j, :, span(offset, SLICE_WORDS)] for offset in offsets],
        writes=[y[y_rows, y_columns]],
        waits=[stored[i, j]],
        values=values,
        name=f"{name}sum_parts",
    )
