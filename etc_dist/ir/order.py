"""The order of a call's tasks: maps from the task index, in loops turn by turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from etc_dist.errors import GraphError
from etc_dist.ir.call import TASK, Coordinate, Grid, row_major, size_of
from etc_dist.ir.expr import Expr, substitute, wrap

Order = Callable[[Expr], Sequence["Expr | int"]]


def task_order(
    order: Order | None, loops: Sequence[Coordinate], grid: Grid, where: str
) -> tuple[Expr, ...]:
    """The coordinate of task t of a call of `grid` in `loops`; `order` maps the index
    of a task in its turn to a coordinate of the grid. Raises GraphError for another
    number of coordinates, and for a grid with a loaded extent."""
    if order is None:
        return row_major((*loops, *grid.axes), TASK)
    if any(axis.count is not None for axis in grid.axes):
        raise GraphError(
            "order= of a grid with a loaded extent",
            where=where,
            wanted="the row-major order, in which surplus tasks follow each other",
            got=", ".join(map(str, grid.axes)),
            fix="omit order=, and give the axes of g.grid() in the order of the tasks",
        )
    parts = order(TASK)
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
    num_tasks = size_of(grid.axes)
    in_turn = {TASK.name: TASK % num_tasks}
    turns = row_major(loops, TASK // num_tasks)
    return (*turns, *(substitute(part, in_turn) for part in inner))
