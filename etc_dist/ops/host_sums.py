"""The reduction over hosts: the ranks of a host are summed there, and each sum is sent
once to the host of its owner."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from etc_dist.functions.push_far import push_far
from etc_dist.functions.sum_pieces import sum_pieces
from etc_dist.functions.sum_ranks import sum_ranks
from etc_dist.ir import (
    DeviceFunction,
    EventRef,
    EventTensor,
    Expr,
    Graph,
    Region,
    Tensor,
    ceildiv,
    minimum,
    select,
    span,
    tile,
)
from etc_dist.ir.expr import wrap
from etc_dist.ir.tensor import Tile
from etc_dist.ops.order import rotated_owners, split_tile


def host_after(g: Graph, step: Expr | int) -> Expr:
    """The host `step` + 1 hosts after this rank's: the last step is this host."""
    return (g.rank // g.local_size + 1 + step) % (g.world_size // g.local_size)


def near_rank(g: Graph, local: Expr) -> Expr:
    """The rank with the local rank `local` on this rank's host."""
    if g.local_size == g.world_size:
        return local
    return g.rank // g.local_size * g.local_size + local


def near_owners(
    g: Graph, t: Expr, blocks: Expr, columns: Expr, group: int
) -> tuple[Expr, Expr, Expr, Expr]:
    """(s, l, i, j): tiles for the ranks of one host after the other, this host's last,
    so that transfers between hosts begin early. Within a host as `rotated_owners`; l is
    the local rank of the owner."""
    each = g.local_size * blocks * columns
    return t // each, *rotated_owners(t % each, g.local_size, blocks, columns, group)


def add_host_sums(
    g: Graph,
    near_sum: DeviceFunction,
    slots: Callable[[Expr | int, Expr, Expr, Expr], Region],
    ready: EventTensor,
    y: Tensor,
    *,
    tile_shape: tuple[int, int],
    piece: tuple[int, int],
    partials: str,
) -> None:
    """Add the reduction over hosts: y [rows, n], this rank's rows.

    `near_sum` sums `slots(s, r, j, q)`: the near ranks' parts, for `host_after(s)`, of
    a piece in columns q of tile column j and in rows r, counted over all tiles.
    ready [hosts, blocks, columns]: the event of each tile. A sum has the dtype
    `partials`. It goes to the rank of this local rank on its host, which adds the sums
    of all hosts in their order."""
    (height, width), (piece_rows, piece_columns) = tile_shape, piece
    down, across = split_tile(g.name, height, piece)
    across *= width // height
    own, hosts = g.rank // g.local_size, g.world_size // g.local_size
    rows, n = y.shape
    _, blocks, columns = ready.shape
    strips = g.let("strips", ceildiv(rows, piece_rows))
    # The strips of piece_columns columns of a tile follow each other, so that a tile is
    # contiguous without what lies outside of y, and is sent by one message.
    of_tiles = (blocks * columns * across * height, piece_columns)
    staged = g.symmetric("staged_sums", (hosts - 1, *of_tiles), partials)
    sums = g.symmetric("sums", (hosts, *of_tiles), partials)

    def pieces(i: Expr) -> Expr:
        return across * minimum(down, strips - i * down)

    summed = g.events(
        "summed", (hosts - 1, blocks, columns), expects=lambda s, i, j: pieces(i)
    )
    complete = g.events(
        "complete",
        (blocks, columns),
        expects=lambda i, j: hosts - 1 + pieces(i),
        cross_rank=True,
    )

    def of_tile(i: Expr, j: Expr) -> Tile:
        inside = minimum(across, ceildiv(n - j * width, piece_columns))
        first = (i * columns + j) * (across * height)
        return span(first, inside * minimum(height, rows - i * height))

    def of_piece(r: Expr, j: Expr, q: Expr) -> Tile:
        i = r // down
        first = of_tile(i, j).start + q * minimum(height, rows - i * height)
        size = minimum(piece_rows, rows - r * piece_rows)
        inside = j * width + q * piece_columns < n
        return span(first + r % down * piece_rows, select(inside, size, 0))

    # Column by column, as tiles are computed.
    with g.loop(turn=(hosts - 1) * columns) as turn:
        s, j = turn // columns, turn % columns
        r, q = grid = g.grid(r=strips, q=across)
        g.call(
            near_sum,
            grid,
            name="sum_near",
            reads=[slots(s, r, j, q)],
            writes=[staged[s, of_piece(r, j, q), :]],
            waits=[ready[s, r // down, j]],
            notifies=[summed[s, r // down, j]],
        )
        (i,) = grid = g.grid(i=blocks)
        owner = (g.rank + (s + 1) * g.local_size) % g.world_size
        g.call(
            push_far(),
            grid,
            name="send_sums",
            reads=[staged[s, of_tile(i, j), :]],
            writes=[sums.on(owner)[own, of_tile(i, j), :]],
            waits=[summed[s, i, j]],
            notifies=[complete.on(owner)[i, j]],
        )
    j, r, q = grid = g.grid(j=columns, r=strips, q=across)
    g.call(
        near_sum,
        grid,
        name="sum_own",
        reads=[slots(hosts - 1, r, j, q)],
        writes=[sums[own, of_piece(r, j, q), :]],
        waits=[ready[hosts - 1, r // down, j]],
        notifies=[complete[r // down, j]],
    )
    g.call(
        sum_pieces(partials, y.dtype),
        grid,
        name="sum_hosts",
        reads=[sums[:, of_piece(r, j, q), :]],
        writes=[
            y[tile(r, piece_rows), span(j * width + q * piece_columns, piece_columns)]
        ],
        waits=[complete[r // down, j]],
    )


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
