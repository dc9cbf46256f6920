"""The next token of each row of logits."""

from __future__ import annotations

from etc_dist.functions.best_column import best_column, next_token, unpadded_tile
from etc_dist.functions.sample_column import NUMBERS, least_kept, sample_column
from etc_dist.ir import Graph, ceildiv, graph_function, span
from etc_dist.models.decoder_ranks import best_of_ranks


@graph_function
def next_tokens(
    g: Graph, *, width: int = 64, dtype: str = "bfloat16", samples: bool = False
) -> None:
    """best [rows]: of `count` columns of x that of the largest number, or one by
    chance; the others are padding. Each rank has columns of x. after: the next
    positions. least [rows]: the least logit that can be drawn."""
    rows, columns, stops, count = g.dims("rows columns stops count")
    num_tiles = g.let("tiles", ceildiv(columns, width))
    x = g.input("x", (rows, columns), dtype)
    position, end = (g.input(n, (rows,), "int32") for n in ("position", "end"))
    stop = g.input("stop", (rows, stops), "int32")
    best, after = (g.output(n, (rows,), "int32") for n in ("best", "after"))
    values = g.local("values", (rows, num_tiles), "float32")
    ids = g.local("ids", (rows, num_tiles), "int32")
    tile_event = g.events("found", (1,), expects=num_tiles)
    (j,) = grid = g.grid(j=num_tiles)
    of_tile = {"reads": [unpadded_tile(x, j, width, count)]}
    of_tile |= {"writes": [values[:, j], ids[:, j]], "notifies": [tile_event[0]]}
    if samples:
        sampling = g.input("sampling", (rows, NUMBERS), "int32")
        least = g.output("least", (rows,), "float32")
        limited = g.events("limited", (1,), expects=rows)
        (r,) = row_grid = g.grid(r=rows)
        row = span(r, 1)
        reads, notifies = [x[row, span(0, count)], sampling[row, :]], [limited[0]]
        writes = [least[row]]
        g.call(
            least_kept(dtype), row_grid, reads=reads, writes=writes, notifies=notifies
        )
        of_tile["reads"] += [sampling[:, :], position[:], least[:]]
        options = {"waits": [limited[0]], "values": {"first": 0}}
        g.call(sample_column(dtype, width), grid, **of_tile, **options)
    else:
        g.call(best_column(dtype), grid, **of_tile)
    found_at, wait = (values, ids), tile_event[0]
    if g.world_size > 1:
        *found_at, wait = best_of_ranks(g, (values, ids), width, columns, 1, 0, wait)
    g.call(
        next_token(width if g.world_size == 1 else 0),
        g.grid(one=1),
        reads=[*(t[:, :] for t in found_at), position[:], end[:], stop[:, :]],
        writes=[best[:], after[:]],
        waits=[wait],
    )
