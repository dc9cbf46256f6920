"""Task orders: maps from a task's index to its coordinates."""

from __future__ import annotations

from typing import NamedTuple

from etc_dist.ir import Expr, Graph, ceildiv, maximum, minimum, select, tile
from etc_dist.ir.call import Grid
from etc_dist.ir.expr import wrap
from etc_dist.ir.order import Order
from etc_dist.ir.tensor import Tile

ROW_GROUP = 8
"""Row blocks whose tiles run together, so that they share operand tiles in L2."""
KEPT_UP = 2048
"""The columns of a matmul whose tiles take the tensor cores about as long as a transfer
lane takes to quantize their rows. Assumed."""
LEAST_GROUP = 12
"""The same where rows have several owners, at least: then the 132 tiles of a wave have
about as many rows as columns, so that they read few bytes."""
KEPT_BYTES = 20 << 20
"""Of x, that stay in the L2 cache from one column of tiles to the next. Of the 50 MB of
an H100 or H200, the rest is for weights and results, which pass through."""


def row_group(blocks: Expr, height: Expr, row_bytes: Expr, owners: int) -> Expr:
    """How many of the `blocks` row blocks of each owner run together. x has `owners`
    times as many rows, in blocks of `height` rows of `row_bytes`.

    A model of the bytes that are read from DRAM: each group reads all weights once.
    Its rows of x are read once if they stay in the L2 cache from one column of tiles to
    the next, otherwise once in each wave. So as many blocks run together as KEPT_BYTES
    hold, or LEAST_GROUP if these are more. All groups have nearly equal size."""
    num_cached_blocks = KEPT_BYTES // row_bytes // (owners * height)
    most = maximum(ceildiv(LEAST_GROUP, owners), num_cached_blocks)
    return ceildiv(blocks, ceildiv(blocks, most))


def later_blocks(blocks: Expr | int, n: Expr | int) -> Expr:
    """Of so many row blocks that are quantized, those that are while the tiles of
    others are multiplied, by n columns. The first group of them is not."""
    later = maximum(0, blocks - wrap(ROW_GROUP))
    return later * minimum(n, KEPT_UP) // KEPT_UP


def grouped_rows(
    t: Expr, blocks: Expr | int, columns: Expr | int, group: Expr | int
) -> tuple[Expr, Expr]:
    """(i, j): groups of `group` row blocks, columns inside, rows innermost, so that a
    wave of workers shares few operand tiles in L2."""
    # NOTE: a launch knows both divisors, so that the host prepares them. It cannot
    # prepare a height that depends on g. The maximum shows that a divisor is positive.
    if not isinstance(group, int):
        group = maximum(1, group)
    g, local_idx = t // (group * columns), t % (group * columns)
    last_height = maximum(1, blocks % group)
    is_full = g < wrap(blocks) // group
    i = select(is_full, local_idx % group, local_idx % last_height)
    return g * group + i, select(is_full, local_idx // group, local_idx // last_height)


class TileGrid(NamedTuple):
    """The tiles of a matrix: how many there are down and across, a task for each, and
    the task's rows and columns."""

    down: Expr
    across: Expr
    grid: Grid
    rows: Tile
    columns: Tile
    order: Order


def tile_grid(
    g: Graph,
    prefix: str,
    shape: tuple[Expr, Expr],
    rows: Expr | int,
    columns: Expr | int,
) -> TileGrid:
    """Tiles of rows x columns of a matrix of `shape`, in groups of row blocks. The
    names of their numbers begin with `prefix`."""
    down = g.let(f"{prefix}tiles_down", ceildiv(shape[0], rows))
    across = g.let(f"{prefix}tiles_across", ceildiv(shape[1], columns))
    i, j = grid = g.grid(i=down, j=across)

    def order(t: Expr) -> tuple[Expr, Expr]:
        return grouped_rows(t, down, across, ROW_GROUP)

    return TileGrid(down, across, grid, tile(i, rows), tile(j, columns), order)


def shards_in_turn(
    t: Expr, blocks: Expr | int, columns: Expr | int, group: Expr | int
) -> tuple[Expr, Expr, Expr]:
    """(p, i, j): one shard of rows after the other, `grouped_rows` within each."""
    num_tiles = blocks * columns
    return t // num_tiles, *grouped_rows(t % num_tiles, blocks, columns, group)


def last_between(t: Expr, parts: int, tasks: Expr | int) -> tuple[Expr, Expr]:
    """(p, i): `parts` > 1 parts of `tasks` tasks each, one part after the other, with
    the tasks of the last part spread evenly between those of the others."""
    turn, place = t // parts, t % parts
    is_last = place // (parts - 1)
    other_idx = turn * (parts - 1) + place
    p = (1 - is_last) * (other_idx // tasks) + is_last * (parts - 1)
    return p, (1 - is_last) * (other_idx % tasks) + is_last * turn


def owners_together(
    t: Expr, owners: int, blocks: Expr, columns: Expr, group: Expr, late: Expr
) -> tuple[Expr, Expr, Expr]:
    """(p, i, j): groups of `group` row blocks of each of `owners` > 1 owners, columns
    inside, rows of all owners innermost. But the last `late` tiles of the last owner
    follow all others: while they are computed, those of the others are sent."""
    num_others, num_tiles = owners - 1, blocks * columns
    early = owners * (num_tiles - late)
    tail = maximum(0, t - early)
    is_early, is_other = t < early, tail < num_others * late
    # NOTE: a launch knows the divisors if they are the same for all tiles: the index of
    # a tile among those of its owners, times stride / the number of these owners. The
    # maximum shows that it is not negative.
    stride = owners * num_others
    num_other_tiles = num_others * (num_tiles - late) + tail
    own_tail = num_tiles - late + tail - num_others * late
    index = select(is_other, owners * num_other_tiles, stride * own_tail)
    place = maximum(0, select(is_early, num_others * t, index))
    group = maximum(1, group)
    of_group = stride * group * columns
    g, local_idx = place // of_group, place % of_group
    last = maximum(1, blocks % group)
    is_full = g < blocks // group
    j = select(is_full, local_idx // (stride * group), local_idx // (stride * last))
    inner = select(is_full, local_idx % (stride * group), local_idx % (stride * last))
    p = inner % stride
    p = select(is_early, p // num_others, select(is_other, p // owners, num_others))
    return p, g * group + inner // stride, j
