"""A matrix multiplication in a graph, with k divided among tasks for the tiles that do
not fill a wave of workers."""

from __future__ import annotations

from collections.abc import Sequence

from etc_dist.functions.epilogue import Epilogue, store
from etc_dist.functions.matmul import STAGE_K
from etc_dist.functions.tile_matmul import GROUP_WORDS, SLICE, SLICE_WORDS, Tiles
from etc_dist.ir import (
    Expr,
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
    """y [m, n] = epilogue of x [m, k] and `weights`; the names of its numbers begin
    with `name`.

    The last `{name}split_columns` columns of tiles, a dim, are divided along k into
    `{name}parts` tasks each, another dim. These begin first, and store fp32 sums. Last,
    further tasks add them in the order of k."""
    (m, n), k, gated = y.shape, x.shape[1], epilogue.gated
    columns, values = tiles.half_columns() if gated else tiles.columns, tiles.values
    split, parts = g.dims(f"{name}split_columns {name}parts")
    down = g.let(f"{name}tiles_down", ceildiv(m, tiles.rows))
    whole = g.let(f"{name}whole_columns", ceildiv(n, columns) - split)
    boxes = g.let(
        f"{name}part_boxes",
        ceildiv(ceildiv(k, STAGE_K * tiles.k_boxes), parts) * tiles.k_boxes,
    )
    sums = g.local(f"{name}sums", (down, split, parts, tiles.part_words), "float32")
    added = g.events(f"{name}added", (down, split), expects=parts)

    def grouped(t: Expr, across: Expr) -> tuple[Expr, Expr]:
        return grouped_rows(t, down, across, ROW_GROUP)

    axes = [f"{name}{axis}" for axis in ("part", "part_row", "part_column")]
    p, i, j = grid = g.grid(**dict(zip(axes, (parts, down, split), strict=True)))
    of_k = tile(p, STAGE_K * boxes)
    g.call(
        tiles.matmul(dtype, epilogue, is_part=True),
        grid,
        reads=[
            x[tile(i, tiles.rows), of_k],
            *(tiles.of(w, tile(whole + j, columns), of_k) for w in weights),
        ],
        writes=[sums[i, j, p, :]],
        notifies=[added[i, j]],
        values=values,
        name=f"{name}multiply_parts",
    )
    i, j = grid = g.grid(**{f"{name}row": down, f"{name}column": whole})
    g.call(
        tiles.matmul(dtype, epilogue),
        grid,
        reads=[
            x[tile(i, tiles.rows), :],
            *(tiles.of(w, tile(j, columns)) for w in weights),
        ],
        writes=[y[tile(i, tiles.rows), tile(j, columns)]],
        order=lambda t: grouped(t, whole),
        values=values,
        name=f"{name}tile_matmul",
    )
    is_swapped = tiles.is_swapped
    wide = is_swapped * tiles.rows + (1 - is_swapped) * columns
    slices = g.let(f"{name}slices", ceildiv(wide, SLICE))
    axes = [f"{name}{axis}" for axis in ("sum_row", "sum_column", "slice")]
    i, j, s = grid = g.grid(**dict(zip(axes, (down, split, slices), strict=True)))
    of_slice = minimum(SLICE, wide - s * SLICE)
    rows, across = (
        span(
            index * size + s * SLICE * is_cut,
            select(equal(is_cut, 1), of_slice, size),
        )
        for index, size, is_cut in (
            (i, tiles.rows, is_swapped),
            (whole + j, columns, 1 - is_swapped),
        )
    )
    places = [s * SLICE_WORDS]
    if gated:
        places += [s * SLICE_WORDS + (1 - is_swapped) * columns * (GROUP_WORDS // 8)]
    g.call(
        tiles.sum_parts(dtype, epilogue),
        grid,
        reads=[sums[i, j, :, span(place, SLICE_WORDS)] for place in places],
        writes=[y[rows, across]],
        waits=[added[i, j]],
        values=values,
        name=f"{name}sum_parts",
    )
