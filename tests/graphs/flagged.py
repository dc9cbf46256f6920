"""Sums over ranks whose parts are sent as flagged words."""

from __future__ import annotations

from typing import Any

from etc_dist.functions.flags import add_flagged, push_flagged
from etc_dist.functions.push_rows import push_rows
from etc_dist.ir import Graph, graph_function, tile


@graph_function
def flagged_sum(
    g: Graph,
    *,
    pieces: int = 1,
    dtype: str = "bfloat16",
    kind: str = "flagged",
    answers: bool = True,
    waits_for: int = 0,
    twice: bool = False,
    reads: int = 0,
    by_flag: bool = False,
    is_named: bool = True,
) -> None:
    """y: the sum of the ranks' x, of pieces of 8 * vectors elements. All but `pieces`
    and `dtype` make it wrong. kind: of the tensor of words. answers: all ranks send,
    else rank 0 alone. waits_for: the element that tasks wait for is so much further.
    twice: two tasks write the words. reads: so many pieces are not read. by_flag: a
    plain copy of x has no other notification than the words. is_named: the sender
    notifies the event of the words."""
    n, world = 8 * g.dims("vectors"), g.world_size
    x, y = (f(t, (pieces * n,), dtype) for f, t in ((g.input, "x"), (g.output, "y")))
    words = getattr(g, kind)("words", (world, pieces * n), dtype)
    options: dict[str, Any] = {"cross_rank": True, "carried_by": words}
    expects = (world - 1) * (1 + twice)
    arrivals = g.events("arrived", (pieces,), expects=expects, **options)
    peers = [(g.rank + distance) % world for distance in range(1, world)]
    senders, receivers = (1, 1) if answers else (1 - g.rank, g.rank)
    for name in ("push", "again")[: 1 + twice]:
        i, _ = grid = g.grid(i=pieces, s=senders)
        g.call(
            push_flagged(dtype, len(peers)),
            grid,
            name=name,
            reads=[x[tile(i, n)]],
            writes=[words.on(peer)[g.rank, tile(i, n)] for peer in peers],
            notifies=[arrivals.on(peer)[i] for peer in peers] if is_named else [],
        )
    copy = push_rows("tensor")
    if by_flag:
        extra = g.symmetric("extra", (pieces * n,), dtype)
        (i,) = grid = g.grid(i=pieces)
        g.call(
            copy, grid, reads=[x[tile(i, n)]], writes=[extra.on(peers[0])[tile(i, n)]]
        )
    i, _ = grid = g.grid(i=pieces - reads, s=receivers)
    g.call(
        add_flagged(dtype),
        grid,
        reads=[x[tile(i, n)], words[:, tile(i, n)]],
        writes=[y[tile(i, n)]],
        waits=[arrivals[(i + waits_for) % pieces]],
    )
    if not answers:  # the other rank copies x
        i, _ = grid = g.grid(i=pieces, s=1 - g.rank)
        g.call(copy, grid, name="copy", reads=[x[tile(i, n)]], writes=[y[tile(i, n)]])
