"""The steps of a mixture of experts that compute each token alone: GEMVs with the rows
of weights that it needs. Nothing is planned, and no rows are grouped by expert."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from etc_dist.functions.activation import SWIGLU, Activation
from etc_dist.functions.down_token import down_token
from etc_dist.functions.gate_up_token import gate_up_token
from etc_dist.functions.routing import Routing
from etc_dist.ir import (
    EventRef,
    EventTensor,
    Expr,
    Graph,
    Region,
    Tensor,
    ceildiv,
    minimum,
    span,
    tile,
)
from etc_dist.ir.tensor import Tile

FEW_BYTES = 350_000_000
"""Bytes of weights that tokens alone read at most. With more, the bytes alone take the
time, and there matmuls that read an expert once for all its tokens are faster."""
PRODUCT_TASKS = 132
"""Tasks of a product that read weights concurrently, about one for each worker."""
PREFETCH_BYTES = 30_000_000
"""`gate_up_token` prefetches rows of down into L2 for one token that reads at most so
many bytes of them, and not for several tokens."""


def bytes_fit(most: int, top_k: int, hidden: Expr, inner: Expr, matrices: int) -> Expr:
    """1 if a token reads at most so many bytes of `matrices` [hidden, inner] of each of
    its experts, else 0."""
    # Divisions: a product of sizes might not fit 32 bits.
    return minimum(1, most // (2 * matrices * top_k) // hidden // inner)


def sums_of(g: Graph, hidden: Expr, tasks: Expr | int) -> tuple[Expr, Expr]:
    """The tasks of a token's sums, and the columns of each, which come in pairs."""
    width = g.let("down_columns", 2 * ceildiv(hidden, 2 * tasks))
    return g.let("down_blocks", ceildiv(hidden, width)), width


@dataclass(frozen=True)
class TokenExperts:
    """Experts of which each of `tokens` tokens takes some, and the calls for them.

    gate_up: gate's rows and up's, in one tensor [..., experts, 2 inner, hidden], or in
    two [..., experts, inner, hidden]. down: [..., experts, hidden, inner]. layer: the
    indices of their axes in front. turns, turn: the loops around the calls, and the
    indices of one of their turns. name: the prefix of names. tasks: of the activations
    of a token. sums: as `sums_of` gives them. prefetches: 1 if `activate` prefetches
    rows of down, else 0."""

    g: Graph
    routing: Routing
    tokens: Expr
    gate_up: Sequence[Tensor]
    down: Tensor
    tasks: Expr | int
    sums: tuple[Expr, Expr]
    prefetches: Expr | int
    activation: Activation = SWIGLU
    biases: Sequence[Region] = ()
    layer: tuple[Expr, ...] = ()
    turns: tuple[Expr, ...] = ()
    turn: tuple[Expr, ...] = ()
    name: str = ""

    def activate(
        self,
        x: Tensor,
        logits: Tensor,
        waits: Callable[[Expr], Sequence[EventRef]],
        further: Expr | int = 0,
    ) -> tuple[Tensor, EventTensor]:
        """Add the activations of each token, and the events after which they can be
        read. waits: of token m; after the last one its logits can be read. further:
        notifications of others."""
        g, routing = self.g, self.routing
        hidden, inner = self.down.shape[-2:]
        shape = self.tokens, routing.top_k, inner
        active = g.local(f"{self.name}active", shape, routing.dtype)
        width = g.let(f"{self.name}up_columns", ceildiv(inner, self.tasks))
        blocks = g.let(f"{self.name}up_blocks", ceildiv(inner, width))
        activated = g.events(
            f"{self.name}activated",
            (*self.turns, self.tokens),
            expects=blocks + further,
        )
        m, j = grid = g.grid(m=self.tokens, j=blocks)
        token, first = span(m, 1), j * width
        left = minimum(width, inner - first)
        share = ceildiv(hidden, blocks) * self.prefetches
        share = g.let(f"{self.name}prefetched_rows", share)
        gate, up = self.gate_up[0], self.gate_up[-1]
        of_up = first + (inner if gate is up else 0)
        g.call(
            gate_up_token(routing, self.activation),
            grid,
            name=f"{self.name}gate_up_token",
            reads=[
                x[token, :],
                logits[token, span(0, routing.experts)],
                self._weight(gate, span(first, left)),
                self._weight(up, span(of_up, left)),
                self._weight(self.down, span(minimum(hidden, j * share), share)),
                *self.biases,
            ],
            writes=[active[token, :, span(first, left)]],
            waits=waits(m),
            notifies=[activated[(*self.turn, m)]],
        )
        return active, activated

    def add_up(
        self,
        chosen: Callable[[Tile], Sequence[Region]],
        active: tuple[Tensor, EventTensor],
        waits: Callable[[Expr], Sequence[EventRef]],
        places: Callable[[Tile, Tile], Sequence[Region]],
        notifies: Callable[[Expr], Sequence[EventRef]],
        added: Tensor | None = None,
    ) -> None:
        """Add the weighted sums of each token. chosen: its ids and weights, which can
        be read after `waits`. active: as `activate` gives them. places: where some
        columns of a token's sums are stored. notifies: events of token m. added: rows
        that are added to the sums, which the events of `active` cover, too."""
        g, (rows, activated) = self.g, active
        blocks, width = self.sums
        m, j = grid = g.grid(m=self.tokens, j=blocks)
        token, of_block = span(m, 1), tile(j, width)
        writes = places(token, of_block)
        g.call(
            down_token(self.routing, adds=added is not None, copies=len(writes)),
            grid,
            name=f"{self.name}down_token",
            reads=[
                *chosen(token),
                rows[token, :, :],
                self._weight(self.down, of_block),
                *([] if added is None else [added[token, of_block]]),
            ],
            writes=writes,
            waits=[*waits(m), activated[(*self.turn, m)]],
            notifies=notifies(m),
        )

    def _weight(self, weight: Tensor, rows: Tile) -> Region:
        """Rows of all experts."""
        return weight[(*self.layer, slice(None), rows, slice(None))]
