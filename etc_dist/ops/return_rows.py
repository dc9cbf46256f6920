"""Partial sums of the rows of all ranks, which are returned to the ranks that own
them."""

from __future__ import annotations

from etc_dist.functions.add_partials import add_partials
from etc_dist.functions.epilogue import partial as store_partial
from etc_dist.functions.epilogue import store
from etc_dist.functions.push_tile import push_tile
from etc_dist.functions.scaled_weights import ScaledTensor
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
from etc_dist.ops.host_sums import HostSums, host_after
from etc_dist.ops.multiply import Matrix, RowEvents, TiledMatmul
from etc_dist.ops.near_ranks import near_rank
from etc_dist.ops.quantized_rows import rank_rows_for
from etc_dist.ops.rank_tiles import RankTiles
from etc_dist.ops.tile_order import owners_together, shards_in_turn

WAVE = 128
"""About the number of tiles that run at the same time. So many of the last own tiles
follow all other tiles: while they are computed, those of the others are sent. By
simulated runs (`predict/`), half as many take up to 13 % longer. Not measured."""
PACKET_BYTES = 4096
"""Bytes that one warp sends before it notifies, unless one row of a strip is longer: a
notification waits for their arrival, so that few bytes are in flight. About 5 KB of an
SM fill the links; more delay the loads of the matmul."""
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

    def __init__(self, g: Graph, y: Tensor, dtype: str) -> None:
        self.g, self._y = g, y
        self.world, self.near = g.world_size, g.local_size
        self.hosts = self.world // self.near
        (rows, n), num_sent = y.shape, self.hosts * (self.near - 1)
        shape = self.world + num_sent, rows, n
        self._partials = g.symmetric("partials", shape, dtype)

    def owner(self, p: Expr | int) -> Expr:
        """The rank that is p-th in turn."""
        rank, near = self.g.rank, self.near
        local = (rank + 1 + p) % near
        if self.hosts == 1:
            return local
        return host_after(self.g, wrap(p) // near) * near + local

    def of(self, p: Expr | int) -> Matrix:
        """This rank's partial sums for the owner that is p-th in turn."""
        near, host, e = self.near, wrap(0), wrap(p)
        if self.hosts > 1:
            host, e = e // near, e % near
        (own_idx,), (sent_idx,) = self.own(host).place, self.sent(host, e).place
        return Matrix(self._partials, (select(equal(e, near - 1), own_idx, sent_idx),))

    def own(self, host: Expr) -> Matrix:
        """The place of this rank's partial sums among those that are added for a host,
        by their owner: this rank, or the near rank to which they are sent."""
        rank = self.g.rank
        place = rank if self.hosts == 1 else host * self.near + rank % self.near
        return Matrix(self._partials, (wrap(place),))

    def sent(self, host: Expr, e: Expr) -> Matrix:
        """This rank's partial sums for the e-th owner of a host, to be sent."""
        place = self.world + host * (self.near - 1) + e
        return Matrix(self._partials, (place,))

    def strip(self, matmul: RankTiles) -> Expr:
        """The number of columns of tiles that are sent together; over several hosts
        all, so that whole rows are sent."""
        if self.hosts > 1:
            return matmul.across
        return self.g.let("strip_tiles", matmul.strip)

    def add(
        self, matmul: RankTiles, produced: EventTensor, strip: Expr, late: Expr
    ) -> None:
        """Add the transfers and the sums. produced: the events [world, blocks, strips]
        of tiles of `of(p)`. late: the number of own tiles that follow all others."""
        g, near, hosts, height = self.g, self.near, self.hosts, matmul.height
        transfers = None
        if near > 1:
            transfers = Transfers(g, self, matmul, produced, strip)
            if hosts == 1:
                return self._add_on_host(matmul, produced, transfers, strip, late)
        num_blocks = matmul.down
        sums = HostSums(g, self._partials, self._y, num_blocks, height, SUMMED)
        with g.loop(turn=hosts * num_blocks) as turn:
            host, i = turn // num_blocks, turn % num_blocks
            ready = [produced[host * near + near - 1, i, 0]]
            if transfers is not None:
                e, q = grid = g.grid(owner=near - 1, packet=transfers.packets)
                transfers.add(grid, (host, e, i, wrap(0), q))
                ready += [transfers.arrival_events[host, i, 0]]
            sums.send(host, i, ready)
        sums.add()

    def _add_on_host(
        self,
        matmul: RankTiles,
        produced: EventTensor,
        transfers: Transfers,
        strip: Expr,
        late: Expr,
    ) -> None:
        """The same on one host. While the blocks of a turn are sent, those of an
        earlier one are summed, whose own tiles are not late: a share of their rows
        before the transfers to each owner."""
        g, y, num_blocks, group = self.g, self._y, matmul.down, matmul.group
        height, num_others = matmul.height, self.world - 1
        width, num_strips = transfers.width, transfers.strips
        turns = ceildiv(num_blocks, group) * num_strips
        late_turns = 1 + ceildiv(late, group * strip)
        after = g.let("summed_after", minimum(turns, late_turns))
        share = g.let("summed_rows", ceildiv(height, num_others))
        num_pieces = g.let("pieces", ceildiv(width, SUMMED))
        most = g.let("piece_rows", maximum(1, SUMMED // width))
        num_share_pieces = g.let("share_pieces", ceildiv(share, most))
        is_float = self._partials.dtype == "float32"
        with g.loop(turn=(turns + after) * num_others) as turn:
            step, e = turn // num_others, turn % num_others
            b, r, c = grid = g.grid(block=group, row=num_share_pieces, piece=num_pieces)
            summed = maximum(0, step - after)
            s = summed % num_strips
            i = select(step < after, num_blocks, summed // num_strips * group + b)
            row, end = e * share + r * most, minimum(height, e * share + share)
            rows = span(i * height + row, maximum(0, minimum(most, end - row)))
            columns = minimum(SUMMED, width - c * SUMMED)
            piece = rows, span(s * width + c * SUMMED, columns)
            g.call(
                add_partials(y.dtype) if is_float else sum_ranks(y.dtype),
                grid,
                name="sum_ranks",
                reads=[self._partials[span(0, self.world), *piece]],
                writes=[y[piece]],
                waits=[
                    events[index, i, s].when(i < num_blocks)
                    for events, index in (
                        (transfers.arrival_events, 0),
                        (produced, num_others),
                    )
                ],
            )
            b, q = grid = g.grid(block=group, packet=transfers.packets)
            i = step // num_strips * group + b
            transfers.add(grid, (wrap(0), e, i, step % num_strips, q), i < num_blocks)


class Transfers:
    """The transfers of the partial sums of `returned_rows`, by packets of rows of a
    strip: `packets` of each block of rows, in `strips` strips of `width` columns of y.
    arrival_events: the events [hosts, blocks, strips] of those that near ranks send."""

    def __init__(
        self,
        g: Graph,
        returned_rows: ReturnedRows,
        matmul: RankTiles,
        produced: EventTensor,
        strip: Expr,
    ) -> None:
        self._g, self._rows, self._produced = g, returned_rows, produced
        self._height, height = matmul.height, matmul.height
        *_, num_blocks, self.strips = produced.shape
        self.width = g.let("strip_columns", matmul.columns * strip)
        partials = returned_rows.own(wrap(0))
        row_bytes = minimum(partials.shape[1], self.width) * partials.tensor.itemsize
        packet = minimum(height, maximum(1, PACKET_BYTES // row_bytes))
        self._packet = g.let("returned_packet_rows", packet)
        self.packets = g.let("returned_packets", ceildiv(height, self._packet))
        self.arrival_events = g.events(
            "returned",
            (returned_rows.hosts, num_blocks, self.strips),
            expects=(returned_rows.near - 1) * self.packets,
            cross_rank=True,
        )

    def add(
        self,
        grid: Grid,
        place: tuple[Expr, Expr, Expr, Expr, Expr],
        condition: Comparison | None = None,
    ) -> None:
        """Add those of `grid`. place: the host, the owner of that host, the block, the
        strip and the packet. condition: whether there is such a block."""
        g, near, (host, e, i, s, q) = self._g, self._rows.near, place
        start = q * self._packet
        rows = span(
            i * self._height + start, minimum(self._packet, self._height - start)
        )
        piece = rows, tile(s, self.width)
        to, p = near_rank(g, (g.rank + 1 + e) % near), host * near + e
        sent_rows, own_rows = self._rows.sent(host, e), self._rows.own(host)
        events = [self._produced[p, i, s], self.arrival_events.on(to)[host, i, s]]
        if condition is not None:
            events = [event.when(condition) for event in events]
        g.call(
            push_tile(sent_rows.tensor.dtype),
            grid,
            name="return_rows",
            reads=[sent_rows.at(*piece)],
            writes=[own_rows.tensor.on(to)[(*own_rows.place, *piece)]],
            waits=events[:1],
            notifies=events[1:],
        )


def add_returned_matmul(
    g: Graph,
    name: str,
    tiles: Tiles,
    x: Tensor,
    w: Tensor | ScaledTensor,
    y: Tensor,
    *,
    waits: RowEvents | None = None,
    partials: str | None = None,
) -> None:
    """y [rows, n]: this rank's rows of the sum over ranks of x [world, rows, k] @ w.T.
    The names of its numbers begin with `name`; `tiles` divide the rows of a rank.
    waits: the events [world, blocks] of blocks of rows of x. partials: "float32", or
    None for the dtype of y. x is quantized first if `tiles` have float8 activations."""
    epilogue = store if partials is None else store_partial
    all_x, x_events = rank_rows_for(g, name, tiles, x, waits)

    def ready(rank: Expr | int) -> RowEvents | None:
        return None if x_events is None else x_events.of(rank)

    if g.world_size == 1:
        first = Matrix.of(all_x, (0,))
        TiledMatmul(g, name, tiles, y.dtype, first, [w], y).add(ready(0))
        return
    returned_rows = ReturnedRows(g, y, partials or y.dtype)
    world, last = returned_rows.world, returned_rows.world - 1
    own_x, own_y = Matrix.of(all_x, (g.rank,)), returned_rows.of(last)
    matmul = RankTiles(
        g,
        name,
        tiles,
        x.dtype,
        own_x,
        [w],
        own_y,
        epilogue,
        owners=world if returned_rows.hosts == 1 else 1,
    )
    strip = returned_rows.strip(matmul)
    produced = matmul.complete_strips("produced", strip, world, last)
    down, across, group = matmul.down, matmul.across, wrap(matmul.group)
    # With split-K, whose sums come last, all own rows follow those of the peers.
    is_split = minimum(1, matmul.split)
    most = select(equal(is_split, 1), down * across, WAVE)
    late = g.let(f"{name}late_tiles", minimum(down * across, most))
    num_owners = g.let(f"{name}owners", world - is_split)

    def order(t: Expr) -> tuple[Expr, Expr, Expr]:
        if returned_rows.hosts == 1:
            return owners_together(t, world, down, across, group, late)
        return shards_in_turn(t, down, across, group)

    def add_whole_tiles() -> None:
        p, *_ = grid = matmul.grid(num_owners, across)
        owner = returned_rows.owner(p)
        matmul.multiply(
            "tile_matmul",
            grid,
            (Matrix.of(all_x, (owner,)), returned_rows.of(p)),
            waits=ready(owner),
            notifies=produced.of(p),
            order=order,
        )
        columns = g.let(f"{name}own_columns", is_split * matmul.whole)
        matmul.add_whole_tiles(ready(g.rank), columns=columns, call="multiply_own")

    matmul.add(ready(g.rank), add_whole_tiles)
    returned_rows.add(matmul, produced.events, strip, late)
