"""The mixture of experts of a decoder's layers.

A router chooses `top_k` experts for each row of a step. The rows of an expert are
divided into tiles. Two matmuls compute a tile with the weights of its expert, by a row
of tasks each. The number of tiles and their experts are known only at run time. A row's
outputs are added in the order of its choices, so that a step has the same bits each
time.

If all rows of the step fit one tile, each chosen expert has one tile with all rows.
The rows that did not choose it cost nothing, since the tensor cores pad few rows
anyway. Otherwise the rows of each expert are gathered first.

A shared expert, which every row takes, is a dense MLP, with another inner size. Its
gate is one more row of the router.

On several ranks each has a part of the inner width of all experts, or some experts as a
whole. Every rank routes all rows, and the ranks' weighted sums are added as for a dense
MLP.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from etc_dist.functions.add_experts_norm import add_experts_norm
from etc_dist.functions.choose_experts import CHOSEN_ROWS, choose_experts
from etc_dist.functions.combine_rows import combine_rows
from etc_dist.functions.epilogue import Epilogue, activated, store
from etc_dist.functions.route_rows import MOST_AT_ONCE, route_rows
from etc_dist.functions.routing import BLOCK, GATED, PLAIN, Mixture
from etc_dist.functions.scaled_weights import ScaledTensor, weight_input
from etc_dist.functions.scatter_row import scatter_row
from etc_dist.functions.tile_matmul import Tiles
from etc_dist.functions.tile_shape import TileShape
from etc_dist.ir import (
    EventRef,
    EventTensor,
    Expr,
    Graph,
    Region,
    Tensor,
    ceildiv,
    equal,
    maximum,
    minimum,
    select,
    span,
    tile,
    up_to,
)
from etc_dist.ir.call import UpTo
from etc_dist.layers.moe_steps import add_scores
from etc_dist.layers.shared_expert import SharedRows
from etc_dist.ops.multiply import Matrix, tiles_of_dims

if TYPE_CHECKING:
    from etc_dist.models.dense_layers import DenseLayers

EXPERT_MATMULS = ("expert_up", "expert_down")
"""The matmuls of the experts; the dims `<name>_shape` choose their tiles."""
SHARED_MATMULS = ("shared_up", "shared_down")
"""Those of a shared expert, by the same dims."""
DENSE_MATMULS = ("dense_up", "dense_down")
"""Those of the MLP of the first layers."""
DENSE_WEIGHTS = ("w_dense_gate", "w_dense_up", "w_dense_down")
"""Its gate, up and down."""
EXPERT_BIASES = ("gate_bias", "up_bias", "down_bias")
"""Those of the experts, if they have any."""
SHARED_WEIGHTS = ("w_shared_gate", "w_shared_up", "w_shared_down")
"""Its gate, up and down."""
SCORED_EXPERTS = 8
"""Experts whose logits a task computes."""
PIECES = 2
"""Tasks that copy a row: 256 for 128 rows, and an H200 has 264 transfer warps."""
Turn = tuple[Expr, Expr]
"""A step, and a layer of it."""


@dataclass(frozen=True)
class DecoderMixture(Mixture):
    """has_dense: the first layers have an MLP in place of experts. own: the number of
    experts of a rank, if each has some as a whole, those of rank 0 first; else 0."""

    has_dense: bool = False
    own: int = 0

    @property
    def held(self) -> int:
        """The experts of which a rank has weights."""
        return self.own or self.experts

    def index(self, expert: int, rank: int) -> int | None:
        """The index of an expert's weights on a rank; None where that has none."""
        num_own, first = self.held, rank * self.own
        return expert - first if first <= expert < first + num_own else None

    @property
    def added(self) -> str:
        """How a row is added after the experts' outputs: that of a shared expert, or of
        a dense layer in its place."""
        return self.shared or (PLAIN if self.has_dense else "")

    @property
    def scored(self) -> int:
        """Rows of the router: the experts, and the gate of the shared one."""
        return self.experts + (self.shared == GATED)

    @property
    def matmuls(self) -> tuple[str, ...]:
        """Of the experts."""
        shared = SHARED_MATMULS if self.shared else ()
        return (*EXPERT_MATMULS, *shared, *(DENSE_MATMULS if self.has_dense else ()))


class MixtureCalls:
    """The tensors of the mixture of a step, and its calls in a layer.

    x: a layer's rows, followed by their gathered copies."""

    def __init__(
        self,
        g: Graph,
        mixture: DecoderMixture,
        dtype: str,
        shapes: Sequence[TileShape],
        sizes: Sequence[Expr],
        position: Tensor,
        early: bool,
        dense: DenseLayers | None,
        layouts: tuple[str, str] = ("nk", "nk"),
    ) -> None:
        """sizes: the rows, the steps, the layers, the hidden and the inner size. early:
        tasks may read operands before their last wait is met. dense: the first layers,
        if these have no experts. layouts: of gate and up, and of down."""
        rows, steps, layers, hidden, inner = sizes
        self.activation = mixture.activation
        self.g, self.routing, self.early = g, mixture.routing(dtype), early
        self.shared, self.scored = mixture.added, mixture.scored
        self.own = mixture.own
        self.rows, self.hidden, self.inner = rows, hidden, inner
        self.turns = steps, layers
        self.position, self.dense = position, dense
        self.most_height = max(shape.rows for shape in shapes)
        self.up, self.down = (
            tiles_of_dims(
                g,
                f"{name}_",
                shapes,
                w_layout=layout,
                has_peers=g.world_size > 1,
            )
            for name, layout in zip(EXPERT_MATMULS, layouts, strict=True)
        )
        experts, top_k = mixture.experts, mixture.router.top_k
        every = layers
        if dense is not None:
            layers = dense.num_others
        self.router = g.input("router", (layers, self.scored, hidden), dtype)
        self.bias_tensors = [
            g.input(name, (layers, experts), "float32")
            for name in mixture.router.bias_names
        ]
        num_held = mixture.held
        stack = layers, num_held
        self.gate_up = [
            weight_input(g, name, layouts[0], inner, hidden, dtype, stack)
            for name in ("w_gate", "w_up")
        ]
        self.w_down = weight_input(g, "w_down", layouts[1], hidden, inner, dtype, stack)
        self.expert_biases = {
            name: g.input(name, (*stack, size), dtype)
            for name, size in zip(EXPERT_BIASES, (inner, inner, hidden), strict=True)
            if mixture.has_biases
        }
        self.experts = g.state("experts", (every, rows, top_k), "int32")
        self._add_tiles(rows * top_k, num_held)

    def _add_tiles(self, num_choices: Expr, num_held: int) -> None:
        """The numbers of the tiles of a step with so many choices, and its buffers."""
        g, rows = self.g, self.rows
        # Both matmuls use the same row tiles: no more rows than both tile shapes have,
        # at a stride at which no bulk copy reads rows of the next tile.
        fits, stride = minimum(self.up.rows, self.down.rows), self.up.rows
        self.tile_rows = g.let("expert_tile_rows", fits)
        self.stride = g.let("expert_stride", maximum(stride, self.down.rows))
        self.gathers = g.let("gathers", select(rows <= self.tile_rows, 0, 1))
        # Few rows choose their experts in the routing task, which saves an event.
        self.at_once = g.let("rows_at_once", select(rows <= MOST_AT_ONCE, rows, 0))
        self.before = g.let("rows_before", rows - self.at_once)
        self.choosing = g.let("choose_blocks", ceildiv(self.before, CHOSEN_ROWS))
        num_choices = g.let("choices", num_choices)
        # The most tiles of any routing: one per expert, full ones for further choices.
        more = maximum(0, num_choices - num_held) // self.tile_rows
        num_tiles = minimum(num_choices, num_held + self.gathers * more)
        self.tiles = g.let("expert_tiles", num_tiles)
        places = g.let("expert_places", self.tiles * self.stride)
        self._add_buffers(places)

    def biases(self, layer: Expr) -> list[Region]:
        """The router's biases of a layer."""
        return [tensor[self._own(layer), :] for tensor in self.bias_tensors]

    def _own(self, layer: Expr) -> Expr:
        """The number of a layer among those with experts."""
        return layer if self.dense is None else self.dense.sparse(layer)

    def _position(self, turn: Turn) -> Expr:
        """The row of positions of a turn's rows."""
        return turn[0] if self.dense is None else self.dense.position_of(turn)

    def _add_buffers(self, places: Expr) -> None:
        g, rows, turns, dtype = self.g, self.rows, self.turns, self.routing.dtype
        choices = rows, self.routing.top_k
        self.first_copy = rows
        if self.shared:  # bulk copies of its tiles read no copy, which may be written
            height = self.most_height
            self.first_copy = g.let("first_copy", ceildiv(rows, height) * height)
        num_rows = self.first_copy + self.gathers * places
        self.x = g.local("expert_x", (num_rows, self.hidden), dtype)
        self.of_experts = span(0, self.routing.experts)
        columns = -(-self.scored // 4) * 4  # logits are stored four at a time
        self.logits = g.local("router_logits", (rows, columns), "float32")
        self.weights = g.local("expert_weights", choices, "float32")
        # NOTE: loaded indices may be written once per run, so each turn has its own.
        self.place = g.local("expert_place", (*turns, *choices), "int32")
        # The expert and the number of rows of a tile, adjacent: one load for both.
        self.tile = g.local("expert_tile", (*turns, self.tiles, 2), "int32")
        self.num_tiles = g.local("expert_tiles_used", (*turns, 1), "int32")
        self.active = g.local("expert_active", (places, self.inner), dtype)
        self.outputs = g.local("expert_outputs", (places, self.hidden), dtype)

    def route(self, turn: Turn, ready: EventRef) -> EventRef:
        """Adds the calls that choose the experts of a layer's rows. ready: they are in
        x. Returns the event after which the choices can be read."""
        scored = self._score(turn, ready)
        chosen_event = self._choose(turn, ready, scored)
        return self._route(turn, ready, chosen_event)

    def _known(self, event: EventRef) -> list[EventRef]:
        """The wait for operands that tasks read before their last wait is met."""
        return [event] if self.early else []

    def _score(self, turn: Turn, ready: EventRef) -> EventTensor:
        """Returns events [..., 2]: 0 for the logits, 1 for the choices."""
        g, routing = self.g, self.routing
        num_blocks = g.let("score_blocks", ceildiv(self.rows, BLOCK))
        num_groups = -(-self.scored // SCORED_EXPERTS)
        scored = g.events(
            "scored",
            (*self.turns, 2),
            expects=lambda *at: select(
                equal(at[-1], 0), num_blocks * num_groups, self.choosing
            ),
        )
        add_scores(
            g,
            routing,
            self.x,
            Matrix(self.router, (self._own(turn[1]),)),
            self.logits,
            (num_blocks, num_groups, SCORED_EXPERTS),
            lambda b: scored[*turn, 0],
            waits=[ready],
            early=self.early,
        )
        return scored

    def _choose(self, turn: Turn, ready: EventRef, scored: EventTensor) -> EventRef:
        """Chooses the experts of the rows, unless these are few. Returns the event that
        routing waits for."""
        g, layer = self.g, turn[1]
        (b,) = grid = g.grid(b=self.choosing)
        block_rows = tile(b, CHOSEN_ROWS)
        g.call(
            choose_experts(
                self.routing, CHOSEN_ROWS, has_position=True, early=self.early
            ),
            grid,
            reads=[
                self.logits[block_rows, self.of_experts],
                self.position[self._position(turn), block_rows],
                *self.biases(layer),
            ],
            writes=[self.experts[layer, block_rows, :], self.weights[block_rows, :]],
            waits=[*self._known(ready), scored[*turn, 0]],
            notifies=[scored[*turn, 1]],
        )
        return scored[*turn, g.let("chosen", minimum(1, self.before))]

    def _route(self, turn: Turn, ready: EventRef, chosen_event: EventRef) -> EventRef:
        g, (step, layer) = self.g, turn
        routed = g.events("routed", self.turns, expects=1)
        new = span(0, minimum(MOST_AT_ONCE, self.at_once))
        g.call(
            route_rows(self.routing, early=self.early, num_own_experts=self.own),
            g.grid(one=1),
            reads=[
                self.logits[new, self.of_experts],
                self.position[self._position(turn), new],
                self.experts[layer, :, :],
                *self.biases(layer),
            ],
            writes=[
                self.experts[layer, new, :],
                self.weights[new, :],
                self.place[step, layer, :, :],
                self.tile[step, layer, :, :],
                self.num_tiles[step, layer, :],
            ],
            waits=[*self._known(ready), chosen_event],
            notifies=[routed[turn]],
            values={
                "tile_rows": self.tile_rows,
                "stride": self.stride,
                "gathers": self.gathers,
            },
        )
        return routed[turn]

    def _gather(self, turn: Turn, routed: EventRef) -> list[EventRef]:
        """If rows are gathered, copies each to the places of its choices. Returns the
        events after which the tiles are complete."""
        g, top_k = self.g, self.routing.top_k
        moved = g.let("gathered_rows", self.gathers * self.rows)
        width = g.let("gather_columns", ceildiv(self.hidden, 8 * PIECES) * 8)
        num_pieces = g.let("gather_pieces", ceildiv(self.hidden, width))
        gather_events = g.events("gathered", self.turns, expects=moved * num_pieces)
        r, j = grid = g.grid(r=moved, j=num_pieces)
        columns = tile(j, width)
        places = [self.place.load(*turn, r, k) for k in range(top_k)]
        g.call(
            scatter_row(top_k, self.routing.dtype),
            grid,
            name="gather",
            reads=[self.x[span(r, 1), columns]],
            writes=[self.x[self._gathered(place), columns] for place in places],
            waits=[routed],
            notifies=[gather_events[turn]],
        )
        return [routed, gather_events[turn]]

    def _gathered(self, place: Expr) -> Any:
        """The row of x at a place; empty for place -1, of a row without a request."""
        return span(self.first_copy + maximum(0, place), minimum(1, place + 1))

    def activate(self, turn: Turn, routed: EventRef) -> list[EventRef]:
        """Adds gate and up of the chosen experts. Returns the events after which their
        tiles are complete."""
        g, layer, tiles = self.g, turn[1], self.tiles
        waits, width = self._gather(turn, routed), self.up.half_columns()
        across = g.let("expert_up_across", ceildiv(self.inner, width))
        self.activated = g.events("activated", (*self.turns, tiles), expects=across)
        r, j = grid = g.grid(r=self._used(turn), j=across)
        columns = tile(j, width)
        expert = self.tile.load(*turn, r, 0)
        first = self.gathers * (self.first_copy + r * self.stride)
        self._call(
            "expert_up",
            self.up,
            activated(self.activation),
            grid,
            reads=[
                self.x[span(first, self._rows_of(turn, r)), :],
                *self._weights(
                    self.up, self.gate_up, EXPERT_BIASES[:2], layer, expert, columns
                ),
            ],
            writes=[self.active[self._places(turn, r), columns]],
            waits=waits,
            notifies=[self.activated[*turn, r]],
            streams_after=1 if self.early else None,
        )
        return waits

    def produce(self, turn: Turn, waits: list[EventRef]) -> list[EventRef]:
        """Adds down of the chosen experts, whose tiles are complete after these events.
        Returns those after which their outputs, places and weights can be read."""
        g, layer, width = self.g, turn[1], self.down.columns
        across = g.let("expert_down_across", ceildiv(self.hidden, width))
        produced = g.events(
            "produced",
            self.turns,
            expects=lambda *turn: self.num_tiles.load(*turn, 0) * across,
        )
        r, j = grid = g.grid(r=self._used(turn), j=across)
        columns = tile(j, width)
        places, expert = self._places(turn, r), self.tile.load(*turn, r, 0)
        self._call(
            "expert_down",
            self.down,
            store,
            grid,
            reads=[
                self.active[places, :],
                *self._weights(
                    self.down, [self.w_down], EXPERT_BIASES[2:], layer, expert, columns
                ),
            ],
            writes=[self.outputs[places, columns]],
            waits=[waits[0], self.activated[*turn, r]],
            notifies=[produced[turn]],
            streams_after=1 if self.early else None,
        )
        return [*waits, produced[turn]]

    def _weights(
        self,
        tiles: Tiles,
        weights: Sequence[Tensor | ScaledTensor],
        biases: Sequence[str],
        layer: Expr,
        expert: Expr,
        columns: Any,
    ) -> list[Region]:
        """What a tile reads of an expert, for some columns of y."""
        place = self._own(layer), expert
        regions = tiles.weight_tiles(weights, columns, place=place)
        tensors = [self.expert_biases[n] for n in biases if n in self.expert_biases]
        return [*regions, *(tensor[*place, columns] for tensor in tensors)]

    def _used(self, turn: Turn) -> UpTo:
        """The number of tiles."""
        return up_to(self.tiles, self.num_tiles.load(*turn, 0))

    def _call(
        self, name: str, tiles: Tiles, epilogue: Epilogue, grid: Any, **where: Any
    ) -> None:
        self.g.call(
            tiles.matmul(
                self.routing.dtype, epilogue, is_biased=bool(self.expert_biases)
            ),
            grid,
            name=f"{name}_matmul",
            values=tiles.values,
            even=True,
            **where,
        )

    def _rows_of(self, turn: Turn, r: Expr) -> Expr:
        return minimum(self.tile_rows, self.tile.load(*turn, r, 1))

    def _places(self, turn: Turn, r: Expr) -> Any:
        """The rows of tile r."""
        return span(r * self.stride, self._rows_of(turn, r))

    def shared_rows(self, rows: Tensor, done_events: Sequence[EventRef]) -> SharedRows:
        """Those of the shared expert, or of an MLP in its place."""
        logits = self.logits if self.shared == GATED else None
        return SharedRows(
            self.shared, rows, logits, done_events, column=self.routing.experts
        )

    def send_sums(
        self,
        turn: Turn,
        waits: list[EventRef],
        parts: Tensor,
        shared: SharedRows,
    ) -> EventTensor:
        """Stores the weighted sum of each row's outputs in this rank's part of `parts`
        [ranks, rows, hidden] on all ranks. Returns events that are met once the parts
        of all ranks have arrived."""
        g, world = self.g, self.g.world_size
        sent_events = g.events(
            "experts_sent", self.turns, expects=world * self.rows, cross_rank=True
        )
        d, r = grid = g.grid(d=world, r=self.rows)
        to, row_columns = (g.rank + 1 + d) % world, (span(r, 1), slice(None))
        g.call(
            combine_rows(
                replace(self.routing, split=not self.own, has_none=bool(self.own)),
                self.shared,
            ),
            grid,
            reads=[
                self.place[*turn, *row_columns],
                self.weights[row_columns],
                self.outputs[:, :],
                *shared.of(*row_columns),
            ],
            writes=[parts.on(to)[g.rank, *row_columns]],
            waits=_after(shared, waits),
            notifies=[sent_events.on(to)[turn]],
        )
        return sent_events

    def add_norm(
        self,
        turn: Turn,
        waits: list[EventRef],
        shared: SharedRows,
        notifies: EventRef,
        residual: Tensor,
        gain: Region,
        normed: Tensor,
        eps: float,
    ) -> None:
        """Adds the weighted outputs to the residual, and normalizes the sum."""
        g = self.g
        (r,) = grid = g.grid(r=self.rows)
        row_columns = span(r, 1), slice(None)
        g.call(
            add_experts_norm(self.routing, eps, self.shared, early=self.early),
            grid,
            reads=[
                self.place[*turn, *row_columns],
                self.weights[row_columns],
                self.outputs[:, :],
                *shared.of(*row_columns),
                residual[row_columns],
                gain,
            ],
            writes=[residual[row_columns], normed[row_columns]],
            waits=_after(shared, waits),
            notifies=[notifies],
            even=True,
        )


def _after(shared: SharedRows, waits: list[EventRef]) -> list[EventRef]:
    """The waits of a sum. The last one, before which it reads no output, stays last."""
    return [*waits[:-1], *shared.done_events, waits[-1]]
