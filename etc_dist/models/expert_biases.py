"""Biases of a router and of experts.

A bias is a column of a matrix: the first one after those that multiply the rows of its
input. These rows have a 1 there, which is written once a run. So a biased matmul is
one with a few more columns, in fp32 until its result is rounded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from etc_dist.functions.ones_column import ones_column
from etc_dist.ir import EventRef, Expr, Graph, Tensor, ceildiv, minimum, span
from etc_dist.ir.expr import wrap

COLUMNS = 64
"""Rows are a multiple of this, so that all of them begin with a line of memory."""
ROWS = 256
"""Rows that a task fills."""
Size = TypeVar("Size", int, Expr)


def with_bias(columns: Size) -> Size:
    """The columns of a matrix with a bias after its `columns`, and then zeros."""
    return columns // COLUMNS * COLUMNS + COLUMNS


def even(size: Expr) -> Expr:
    """A size, which is a multiple of 8, so that this is known of it."""
    return size // 8 * 8


def count_tasks(tensors: Sequence[Tensor]) -> Expr:
    """The tasks of `fill_columns` for these tensors."""
    return sum((ceildiv(x.shape[0], ROWS) for x in tensors), wrap(0))


def fill_columns(
    g: Graph, x: Tensor, begin_event: EventRef, column: Expr | int = 0, first: int = 0
) -> None:
    """Writes `first`, 1 or 0, into a column, and zeros after it. Each task notifies
    begin_event."""
    (b,) = grid = g.grid(b=ceildiv(x.shape[0], ROWS))
    rows = span(b * ROWS, minimum(ROWS, x.shape[0] - b * ROWS))
    g.call(
        ones_column(x.dtype, first),
        grid,
        name=f"fill_{x.name}",
        writes=[x[rows, span(column, x.shape[1] - column)]],
        notifies=[begin_event],
    )
