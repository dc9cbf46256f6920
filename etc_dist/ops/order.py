"""Task orders: maps from a task's index to its coordinates."""

from __future__ import annotations

from typing import NamedTuple

from etc_dist.ir import Expr, Graph, ceildiv, maximum, select, tile
from etc_dist.ir.call import Grid
from etc_dist.ir.expr import wrap
from etc_dist.ir.order import Order
from etc_dist.ir.tensor import Tile

ROW_GROUP = 8
"""Row blocks whose tiles run together, so that they share operand tiles in L2."""


def grouped_rows(
    t: Expr, blocks: Expr | int, columns: Expr | int, group: int
) -> tuple[Expr, Expr]:
    """(i, j): groups of `group` row blocks, columns inside, rows innermost, so that a
    wave of workers shares few operand tiles in L2."""
    g, rest = t // (group * columns), t % (group * columns)
    # NOTE: a launch knows both divisors, so that the host prepares them. It cannot
    # prepare a height that depends on g.
    last_height = maximum(1, blocks % group)
    is_full = g < wrap(blocks) // group
    i = select(is_full, rest % group, rest % last_height)
    return g * group + i, select(is_full, rest // group, rest // last_height)


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
    t: Expr, blocks: Expr | int, columns: Expr | int, group: int
) -> tuple[Expr, Expr, Expr]:
    """(p, i, j): one shard of rows after the other, `grouped_rows` within each."""
    tiles = blocks * columns
    return t // tiles, *grouped_rows(t % tiles, blocks, columns, group)


def last_between(t: Expr, parts: int, tasks: Expr | int) -> tuple[Expr, Expr]:
    """(p, i): `parts` > 1 parts of `tasks` tasks each, one part after the other, with
    the tasks of the last part spread evenly between those of the others."""
    turn, place = t // parts, t % parts
    is_last = place // (parts - 1)
    other = turn * (parts - 1) + place
    p = (1 - is_last) * (other // tasks) + is_last * (parts - 1)
    return p, (1 - is_last) * (other % tasks) + is_last * turn


def owners_in_turn(
    t: Expr, owners: Expr, blocks: Expr, columns: Expr, group: Expr
) -> tuple[Expr, Expr, Expr]:
    """(p, i, j): for each group of row blocks, all owners of rows in turn. Of one
    owner, rows are innermost: its blocks of a group complete together."""
    # NOTE: as in grouped_rows, a launch knows the divisors. The maximum shows that this
    # one is positive.
    group = maximum(1, group)
    of_group = owners * group * columns
    g, rest = t // of_group, t % of_group
    is_full = g < blocks // group
    last = maximum(1, blocks % group)

    def divided(number: Expr, full: Expr | int, last: Expr | int) -> tuple[Expr, Expr]:
        return (
            select(is_full, number // full, number // last),
            select(is_full, number % full, number % last),
        )

    p, inner = divided(rest, group * columns, last * columns)
    j, i = divided(inner, group, last)
    return p, g * group + i, j
