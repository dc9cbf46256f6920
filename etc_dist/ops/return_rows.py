"""Partial sums of the rows of all ranks, which are returned to the ranks that own
them."""

from __future__ import annotations

from etc_dist.functions.add_partials import add_partials
from etc_dist.functions.epilogue import partial as store_partial
from etc_dist.functions.epilogue import store
from etc_dist.functions.push_rows import PACKET_BYTES, push_rows
from etc_dist.functions.sum_ranks import sum_ranks
from etc_dist.functions.tile_matmul import Tiles
from etc_dist.ir import (
    EventTensor,
    Expr,
    Graph,
    Tensor,
    ceildiv,
    equal,
    maximum,
    minimum,
    select,
    span,
    tile,
)
from etc_dist.ir.call import Grid
from etc_dist.ir.expr import Comparison, wrap
from etc_dist.ops.host_sums import HostSums, host_after, near_rank
from etc_dist.ops.multiply import Matrix, RowEvents, TiledMatmul
from etc_dist.ops.order import ROW_GROUP, owners_in_turn, shards_in_turn
from etc_dist.ops.rank_tiles import RankTiles

WAVE = 128
"""About the number of tiles that run at the same time. The tiles of one owner that
follow each other are at most so many, if a row of tiles is not longer. Own rows come
last: while they are computed, those of the others are sent."""
SUMMED = 2048
"""Columns of a row whose partial sums one warp adds, or of several short rows."""


class ReturnedRows:
    """The partial sums of x @ w.T for y [rows, n] of each rank, in `dtype`.

    Owners of rows have a place p in turn: on one host the ranks after this one, then
    this rank. Over several hosts, first those of the host after this one, and so on,
    this host last; of each host the owner with this rank's local rank last.

    One symmetric tensor has the partial sums [rows, n]. The first `world` are those
    that this rank adds: of all ranks in their order, or over several hosts, of the near
    ranks for one host after the other. Then come those to be sent, each to the near
    rank with the owner's local rank."""

    def __init__(
        self, g: Graph, y: Tensor, dtype: str, packet_bytes: int = PACKET_BYTES
    ) -> None:
        self.g, self._y = g, y
        self.world, self.near = g.world_size, g.local_size
        self.hosts = self.world // self.near
        (rows, n), sent = y.shape, self.hosts * (self.near - 1)
        shape = self.world + sent, rows, n
        self._partials = g.symmetric("partials", shape, dtype)
        self._packet_rows = maximum(1, packet_bytes // (n * self._partials.itemsize))

    def owner(self, p: Expr | int) -> Expr:
        """The rank that is p-th in turn."""
        rank, near = self.g.rank, self.near
        local = (rank + 1 + p) % near
        if self.hosts == 1:
            return local
        return host_after(self.g, wrap(p) // near) * near + local

    def of(self, p: Expr | int) -> Matrix:
        """This rank's partial sums for the owner that is p-th in turn."""
        rank, near, e = self.g.rank, self.near, wrap(p)
        own, sent = wrap(rank), self.world + e
        if self.hosts > 1:
            host, e = wrap(p) // near, wrap(p) % near
            own, sent = host * near + rank % near, self.world + host * (near - 1) + e
        return Matrix(self._partials, (select(equal(e, near - 1), own, sent),))

    def add(self, matmul: RankTiles, produced: EventTensor, group: Expr) -> None:
        """Add the transfers and the sums. produced [world, blocks]: the events of the
        blocks of `of(p)`. group: the blocks of each owner in one turn."""
        g, near, hosts, height = self.g, self.near, self.hosts, matmul.height
        if hosts == 1:
            return self._add_on_host(matmul, produced, group)
        blocks = matmul.down
        arrived = self._arrived(blocks, height) if near > 1 else None
        sums = HostSums(g, self._partials, self._y, blocks, height, SUMMED)
        with g.loop(turn=hosts * blocks) as turn:
            host, i = turn // blocks, turn % blocks
            ready = [produced[host * near + near - 1, i]]
            if arrived is not None:
                e, q = grid = g.grid(owner=near - 1, packet=self._packets)
                self._send(grid, (host, e, i, q), produced, arrived, height)
                ready += [arrived[host, i]]
            sums.send(host, i, ready)
        sums.add()

    def _add_on_host(
        self, matmul: RankTiles, produced: EventTensor, group: Expr
    ) -> None:
        """The same on one host. While blocks of one turn are sent, those of the turn
        before are summed: a share of their rows before the transfers to each owner."""
        g, blocks, height, others = self.g, matmul.down, matmul.height, self.world - 1
        arrived, y = self._arrived(blocks, height), self._y
        turns = g.let("turns", ceildiv(blocks, group))
        share = g.let("summed_rows", ceildiv(height, others))
        pieces = g.let("pieces", ceildiv(y.shape[1], SUMMED))
        most = g.let("piece_rows", maximum(1, SUMMED // y.shape[1]))
        with g.loop(turn=(turns + 1) * others) as turn:
            step, e = turn // others, turn % others
            b, r, c = grid = g.grid(block=group, row=ceildiv(share, most), piece=pieces)
            i = select(step < 1, blocks, (step - 1) * group + b)
            row, end = e * share + r * most, minimum(height, e * share + share)
            rows = span(i * height + row, maximum(0, minimum(most, end - row)))
            piece = rows, tile(c, SUMMED)
            is_float = self._partials.dtype == "float32"
            g.call(
                add_partials(y.dtype) if is_float else sum_ranks(y.dtype),
                grid,
                name="sum_ranks",
                reads=[self._partials[span(0, self.world), *piece]],
                writes=[y[piece]],
                waits=[
                    events[index, i].when(i < blocks)
                    for events, index in ((arrived, 0), (produced, others))
                ],
            )
            b, q = grid = g.grid(block=group, packet=self._packets)
            i = step * group + b
            self._send(grid, (0, e, i, q), produced, arrived, height, i < blocks)

    def _arrived(self, blocks: Expr, height: Expr) -> EventTensor:
        """The events of the blocks that near ranks send, for each host."""
        g = self.g
        packet = minimum(height, self._packet_rows)
        self._packet = g.let("returned_packet_rows", packet)
        self._packets = g.let("returned_packets", ceildiv(height, self._packet))
        expected, shape = (self.near - 1) * self._packets, (self.hosts, blocks)
        return g.events("returned", shape, expects=expected, cross_rank=True)

    def _send(
        self,
        grid: Grid,
        place: tuple[Expr | int, Expr, Expr, Expr],
        produced: EventTensor,
        arrived: EventTensor,
        height: Expr,
        condition: Comparison | None = None,
    ) -> None:
        """Add the transfers of packets. place: the host, the owner of that host, the
        block and the packet. condition: whether there is such a block."""
        g, near, (host, e, i, q) = self.g, self.near, place
        start = q * self._packet
        rows = span(i * height + start, minimum(self._packet, height - start))
        to, p = near_rank(g, (g.rank + 1 + e) % near), host * near + e
        own, sent = host * near + g.rank % near, self.world + host * (near - 1) + e
        events = [produced[p, i], arrived.on(to)[host, i]]
        if condition is not None:
            events = [event.when(condition) for event in events]
        g.call(
            push_rows(),
            grid,
            name="return_rows",
            reads=[self._partials[sent, rows, :]],
            writes=[self._partials.on(to)[own, rows, :]],
            waits=events[:1],
            notifies=events[1:],
        )


def add_returned_matmul(
    g: Graph,
    name: str,
    tiles: Tiles,
    x: Tensor,
    w: Tensor,
    y: Tensor,
    *,
    waits: RowEvents | None = None,
    partials: str | None = None,
) -> None:
    """y [rows, n]: this rank's rows of the sum over ranks of x [world, rows, k] @ w.T.
    The names of its numbers begin with `name`; `tiles` divide the rows of a rank.
    waits: the events [world, blocks] of blocks of rows of x. partials: "float32", or
    None for the dtype of y."""
    epilogue = store if partials is None else store_partial

    def ready(rank: Expr | int) -> RowEvents | None:
        return None if waits is None else waits.of(rank)

    if g.world_size == 1:
        first = Matrix(x, (0,))
        TiledMatmul(g, name, tiles, y.dtype, first, [w], y).add(ready(0))
        return
    returned = ReturnedRows(g, y, partials or y.dtype)
    world, last = returned.world, returned.world - 1
    own_x, own_y = Matrix(x, (g.rank,)), returned.of(last)
    matmul = RankTiles(g, name, tiles, x.dtype, own_x, [w], own_y, epilogue)
    produced = matmul.complete_rows("produced", world, matmul.height, last)
    down, across = matmul.down, matmul.across
    # With split-K, whose sums come last, all own rows follow those of the peers.
    is_split = minimum(1, matmul.split)
    group: Expr = wrap(1)
    if returned.hosts == 1:
        turns = ceildiv(down, maximum(1, WAVE // across))
        evenly = ceildiv(down, turns) * (1 - is_split)
        group = g.let(f"{name}row_group", evenly + is_split * down)
    owners = g.let(f"{name}owners", world - is_split)

    def order(t: Expr) -> tuple[Expr, Expr, Expr]:
        if returned.hosts == 1:
            return owners_in_turn(t, owners, down, across, group)
        return shards_in_turn(t, down, across, ROW_GROUP)

    def add_whole_tiles() -> None:
        p, *_ = grid = matmul.grid(owners, across)
        owner = returned.owner(p)
        matmul.multiply(
            "tile_matmul",
            grid,
            (Matrix(x, (owner,)), returned.of(p)),
            waits=ready(owner),
            notifies=RowEvents(produced, matmul.height, (p,)),
            order=order,
        )
        columns = g.let(f"{name}own_columns", is_split * matmul.whole)
        matmul.add_whole_tiles(ready(g.rank), columns=columns, call="multiply_own")

    matmul.add(ready(g.rank), add_whole_tiles)
    returned.add(matmul, produced, group)
