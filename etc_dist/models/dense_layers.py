"""The first layers of a model with a mixture of experts, if they have an MLP instead.

All layers are turns of one loop, with the same calls. In a dense layer no row chooses
an expert, since routing reads positions of rows without a request; the MLP's output
takes the place of the shared expert's, which is computed and not read; without a shared
expert, other layers add zeros. In other layers the tasks of the MLP have no rows."""

from __future__ import annotations

from etc_dist.functions.clear_rows import clear_rows
from etc_dist.functions.plan_shares import MOST_ROWS
from etc_dist.functions.push_rows import push_rows
from etc_dist.ir import (
    EventRef,
    Expr,
    Graph,
    Tensor,
    ceildiv,
    maximum,
    minimum,
    select,
    span,
    tile,
)
from etc_dist.ir.expr import Comparison
from etc_dist.ir.function import TENSOR
from etc_dist.models.experts import Turn

CLEARED_ROWS = 256
"""Rows that a task clears."""


class DenseLayers:
    """Their tensors, and their calls in a layer."""

    def __init__(self, g: Graph, rows: Expr, steps: Expr) -> None:
        self.g, self.rows, self.steps = g, rows, steps
        self.count, self.inner = g.dims("dense_layers dense_inner")
        self.num_others = g.dims("sparse_layers")
        self.no_rows = g.input("no_rows", (1, MOST_ROWS), "int32")

    def is_dense(self, layer: Expr) -> Comparison:
        """Whether a layer is dense."""
        is_dense: Comparison = layer < self.count
        return is_dense

    def sparse(self, layer: Expr) -> Expr:
        """The number of a layer among those with experts."""
        return maximum(0, layer - self.count)

    def dense(self, layer: Expr) -> Expr:
        """The number of a layer among the dense ones."""
        return minimum(layer, self.count - 1)

    def hide_rows(self, position: Tensor, begin_event: EventRef) -> None:
        """Writes positions of rows without a request after those of all steps."""
        self.g.call(
            push_rows(TENSOR),
            self.g.grid(one=1),
            name="hide_rows",
            reads=[self.no_rows[:, span(0, minimum(MOST_ROWS, self.rows))]],
            writes=[
                position[
                    span(self.steps + 1, 1), span(0, minimum(MOST_ROWS, self.rows))
                ]
            ],
            notifies=[begin_event],
        )

    def position_of(self, turn: Turn) -> Expr:
        """The row of positions that routing reads."""
        step, layer = turn
        return select(self.is_dense(layer), self.steps + 1, step)


def num_clearings(x: Tensor) -> Expr:
    """The tasks of `clear`."""
    return ceildiv(x.shape[0], CLEARED_ROWS)


def clear(g: Graph, x: Tensor, begin_event: EventRef) -> None:
    """Clears x. Each task notifies begin_event."""
    (b,) = grid = g.grid(b=num_clearings(x))
    g.call(
        clear_rows(x.dtype),
        grid,
        name=f"clear_{x.name}",
        writes=[x[tile(b, CLEARED_ROWS), :]],
        notifies=[begin_event],
    )
