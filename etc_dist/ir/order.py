"""The order of a call's tasks: maps from the task index, in loops turn by turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from etc_dist.errors import GraphError, expect_type
from etc_dist.ir.call import TASK, Coordinate, Grid, row_major, size_of
from etc_dist.ir.expr import Expr, substitute, wrap

Order = Callable[[Expr], Sequence["Expr | int"]]
Until = Callable[[Expr], "Expr | int"]


def task_order(
    order: Order | None, loops: Sequence[Coordinate], grid: Grid, where: str
) -> tuple[Expr, ...]:
    """The coordinate of task t of a call of `grid` in `loops`; `order` maps the index
    of a task in its turn to a coordinate of the grid."""
    if order is None:
        return row_major((*loops, *grid.axes), TASK)
    parts = order(TASK)
    expect_type(parts, (tuple, list), f"{where}: the result of order=")
    if len(parts) != len(grid):
        raise GraphError(
            "order= does not return a coordinate of the grid",
            where=where,
            wanted=f"a tuple of {len(grid)}, one expression for each axis",
            got=f"({', '.join(map(str, parts))})",
            fix="write order=lambda t: (t,) for one axis, (t // n, t % n) for two",
        )
    inner = tuple(wrap(part, f"{where}: order=") for part in parts)
    if not loops:
        return inner
    tasks = size_of(grid.axes)
    in_turn = {TASK.name: TASK % tasks}
    turns = row_major(loops, TASK // tasks)
    return (*turns, *(substitute(part, in_turn) for part in inner))


def run_end(
    empty_until: Until | None, loops: Sequence[Coordinate], grid: Grid, where: str
) -> Expr | None:
    """The end of the run of empty tasks from task t on; `empty_until` maps the index of
    a task in its turn."""
    if empty_until is None:
        return None
    end = wrap(empty_until(TASK), f"{where}: empty_until=")
    if not loops:
        return end
    in_turn = TASK % size_of(grid.axes)
    return TASK - in_turn + substitute(end, {TASK.name: in_turn})
