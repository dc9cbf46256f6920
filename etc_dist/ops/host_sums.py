"""The reduction over hosts: the ranks of a host are summed there, and each sum is sent
once to the host of its owner."""

from __future__ import annotations

from collections.abc import Sequence

from etc_dist.functions.push_far import push_far
from etc_dist.functions.sum_pieces import sum_pieces
from etc_dist.functions.sum_ranks import sum_ranks
from etc_dist.ir import (
    EventRef,
    Expr,
    Graph,
    Tensor,
    ceildiv,
    span,
    tile,
)
from etc_dist.ir.expr import wrap
from etc_dist.ir.tensor import Tile


def host_after(g: Graph, step: Expr | int) -> Expr:
    """The host `step` + 1 hosts after this rank's: the last step is this host."""
    return (g.rank // g.local_size + 1 + step) % (g.world_size // g.local_size)


class HostSums:
    """The reduction of y [rows, n] over several hosts, by blocks of `height` rows.

    partials [>= world, rows, n]: those of the near ranks for `host_after(0)`, and so
    on. Their sum goes to the rank of this local rank on that host, which adds the sums
    of all hosts in their order. A warp adds `width` columns of a row."""

    def __init__(
        self,
        g: Graph,
        partials: Tensor,
        y: Tensor,
        blocks: Expr,
        height: Expr,
        width: int,
    ) -> None:
        self._g, self._partials, self._y = g, partials, y
        self._blocks, self._height, self._width = blocks, height, width
        self._hosts, dtype = g.world_size // g.local_size, partials.dtype
        self._pieces = g.let("pieces", ceildiv(y.shape[1], width))
        shape = wrap(self._hosts), *y.shape
        self._staged = g.symmetric("staged_sums", shape, dtype)
        self._sums = g.symmetric("host_sums", shape, dtype)
        self._complete = g.events(
            "complete", (blocks,), expects=self._hosts, cross_rank=True
        )

    def send(self, host: Expr | int, block: Expr, ready: Sequence[EventRef]) -> None:
        """Add the sum over the near ranks of a block of rows for a host, counted by
        `host_after`, and its transfer. ready: the events of what is summed."""
        g, near, complete = self._g, self._g.local_size, self._complete
        events = self._hosts, self._blocks
        summed = g.events("summed", events, expects=self._height * self._pieces)
        r, c = grid = g.grid(row=self._height, piece=self._pieces)
        piece = self._piece(block, r, c)
        g.call(
            sum_ranks(self._partials.dtype, near),
            grid,
            name="sum_near",
            reads=[self._partials[span(host * near, near), *piece]],
            writes=[self._staged[host, *piece]],
            waits=ready,
            notifies=[summed[host, block]],
        )
        owner = (g.rank + (host + 1) * near) % g.world_size
        rows = tile(block, self._height)
        g.call(
            push_far(),
            g.grid(one=1),
            name="send_sums",
            reads=[self._staged[host, rows, :]],
            writes=[self._sums.on(owner)[g.rank // near, rows, :]],
            waits=[summed[host, block]],
            notifies=[complete.on(owner)[block]],
        )

    def add(self) -> None:
        """Add the sums over the hosts."""
        g, y, dtype = self._g, self._y, self._partials.dtype
        sizes = {"block": self._blocks, "row": self._height, "piece": self._pieces}
        i, r, c = grid = g.grid(**sizes)
        piece = self._piece(i, r, c)
        g.call(
            sum_pieces(dtype, y.dtype),
            grid,
            name="sum_hosts",
            reads=[self._sums[:, *piece]],
            writes=[y[piece]],
            waits=[self._complete[i]],
        )

    def _piece(self, block: Expr, row: Expr, column: Expr) -> tuple[Tile, Tile]:
        """The region of a piece of a row of a block."""
        return span(block * self._height + row, 1), tile(column, self._width)
