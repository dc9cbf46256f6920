"""The expert of a mixture that every token takes: its outputs, as sums read them, and
its calls in the program for many tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from etc_dist.functions.combine_rows import combine_rows
from etc_dist.functions.epilogue import activated
from etc_dist.functions.router import Router
from etc_dist.functions.routing import GATED, Routing
from etc_dist.functions.scaled_weights import row_regions, weight_input
from etc_dist.ir import (
    EventRef,
    Expr,
    Graph,
    Region,
    Tensor,
    ceildiv,
    minimum,
    span,
    tile,
)
from etc_dist.ir.call import Grid
from etc_dist.ir.tensor import Tile
from etc_dist.layers.moe_steps import (
    ExpertOutputs,
    Sizes,
    Weight,
    add_scores,
    row_tiles,
)
from etc_dist.ops.multiply import Matrix


@dataclass(frozen=True)
class SharedRows:
    """The shared expert's outputs [tokens, hidden], logits whose sigmoids are their
    weights, unless these are 1, and the events after which both are valid; nothing
    without a shared expert. kind: as of `combine_rows`. column: of the logits. first:
    the row of the first token."""

    kind: str = ""
    rows: Tensor | None = None
    logits: Tensor | None = None
    done_events: Sequence[EventRef] = ()
    column: int = 0
    first: Expr | int = 0

    def of(self, tokens: Tile, columns: Any) -> list[Region]:
        """The regions of some tokens and columns that sums read."""
        if self.rows is None:
            return []
        rows = tokens
        if not isinstance(self.first, int):
            rows = span(tokens.start + self.first, tokens.size)
        regions = [self.rows[rows, columns]]
        if self.logits is not None:
            regions.append(self.logits[tokens, span(self.column, 1)])
        return regions


@dataclass(frozen=True)
class ExpertRows:
    """The outputs of the experts, the place of each choice among them, which is valid
    after `located`, and its weight, and the rows of a shared expert."""

    outputs: ExpertOutputs
    place: Tensor
    located: EventRef
    weights: Tensor
    shared: SharedRows

    def combine(
        self,
        g: Graph,
        routing: Routing,
        grid: Grid,
        s: Expr,
        tokens: Tile,
        columns: Tile,
        target: Region,
        notifies: Sequence[EventRef] = (),
    ) -> None:
        """Add the sums of some tokens and columns, in pass s."""
        g.call(
            combine_rows(routing, self.shared.kind),
            grid,
            reads=[
                self.place[tokens, :],
                self.weights[tokens, :],
                self.outputs.rows[:, columns],
                *self.shared.of(tokens, columns),
            ],
            writes=[target],
            waits=[self.outputs.produced[s], self.located, *self.shared.done_events],
            notifies=notifies,
        )


def add_inputs_of_shared(
    g: Graph, dtype: str, kind: str, hidden: Expr, w_layout: str = "nk"
) -> tuple[Expr, Weight, Weight, Tensor | None]:
    """The inner width, gate_up, down, and the gate where there is one: a mixture of one
    expert."""
    inner = g.dims("shared_inner")
    shapes = {"shared_gate_up": (2 * inner, hidden), "shared_down": (hidden, inner)}
    gate_up, down = (
        weight_input(g, name, w_layout, *shape, dtype, (1,))
        for name, shape in shapes.items()
    )
    has_gate = kind == GATED
    gate = g.input("shared_gate", (1, hidden), dtype) if has_gate else None
    return inner, gate_up, down, gate


def shared_routing(routing: Routing, kind: str) -> Routing:
    """The routing of a mixture of the shared expert alone: its weight is the sigmoid of
    its logit, or 1."""
    router = Router(1, False, "sigmoid") if kind == GATED else Router(1)
    return Routing(1, router, routing.dtype, routing.block)


def add_shared(g: Graph, routing: Routing, sizes: Sizes, x: Tensor) -> SharedRows:
    """Add the shared expert's outputs for the rows of x, if there is one."""
    kind = sizes.mixture.shared
    if not kind:
        return SharedRows()
    (own_tokens, hidden), tokens = x.shape, g.largest(x.shape[0])
    inner, gate_up, down, gate = add_inputs_of_shared(
        g, routing.dtype, kind, hidden, sizes.w_layout
    )
    of_up, of_down = row_tiles(g, sizes, tokens, "shared_")
    up_columns, down_columns = of_up.task_columns(gated=True), of_down.task_columns()
    size = g.let("shared_tile_rows", minimum(routing.tile_rows, of_up.rows))
    num_groups = g.let("shared_tiles", ceildiv(tokens, size))
    wide = g.let("shared_wide", ceildiv(inner, up_columns))
    columns = g.let("shared_columns", ceildiv(hidden, down_columns))
    blocks = ceildiv(tokens, routing.block) if gate is not None else 0
    active = g.local("shared_active", (own_tokens, inner), routing.dtype)
    rows = g.local("shared_rows", (own_tokens, hidden), routing.dtype)
    activated_events = g.events("shared_activated", (num_groups,), expects=wide)
    done_events = g.events("shared_done", (1,), expects=num_groups * columns + blocks)
    logits = None
    if gate is not None:
        gated = shared_routing(routing, kind)
        logits = g.local("shared_logits", (own_tokens, 4), "float32")
        add_scores(
            g,
            gated,
            x,
            Matrix(gate),
            logits,
            (g.let("shared_blocks", blocks), 1, 8),
            lambda b: done_events[0],
            "score_shared",
        )

    n, j = grid = g.grid(n=num_groups, j=wide)
    of_rows, width = tile(n, size), minimum(up_columns, inner - j * up_columns)
    halves = [span(k + j * up_columns, width) for k in (0, inner)]
    g.call(
        of_up.matmul_rows(routing.dtype, activated(sizes.mixture.activation)),
        grid,
        name="shared_gate_up_projection",
        values=of_up.values,
        reads=[x[of_rows, :], *row_regions(gate_up, (0,), halves)],
        writes=[active[of_rows, span(j * up_columns, width)]],
        notifies=[activated_events[n]],
    )
    n, j = grid = g.grid(n=num_groups, j=columns)
    of_rows, of_column = tile(n, size), tile(j, down_columns)
    g.call(
        of_down.matmul_rows(routing.dtype),
        grid,
        name="shared_down_projection",
        values=of_down.values,
        reads=[active[of_rows, :], *row_regions(down, (0,), [of_column])],
        writes=[rows[of_rows, of_column]],
        waits=[activated_events[n]],
        notifies=[done_events[0]],
    )
    return SharedRows(kind, rows, logits, [done_events[0]])
