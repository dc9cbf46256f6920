"""The first layers of a model with a mixture of experts, if they have an MLP instead.

All layers are turns of one loop, with the same calls. In a dense layer no row chooses
an expert, since routing reads positions of rows without a request; the MLP's output
takes the place of the shared expert's, which is computed and not read; without a shared
expert, other layers add zeros. In other layers the tasks of the MLP have no rows."""

from __future__ import annotations

from collections.abc import Sequence

from etc_dist.functions.epilogue import Epilogue, store, swiglu
from etc_dist.functions.ones_column import ones_column
from etc_dist.functions.push_rows import push_rows
from etc_dist.functions.route_rows import MOST_ROWS
from etc_dist.functions.scaled_weights import weight_input
from etc_dist.functions.tile_matmul import TileShape
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
)
from etc_dist.ir.function import TENSOR
from etc_dist.models.expert_biases import ROWS
from etc_dist.models.experts import (
    DENSE_MATMULS,
    SharedOutput,
    Turn,
)
from etc_dist.models.sizes import WEIGHTS, DecoderSizes
from etc_dist.ops.multiply import tiles_of_dims
from etc_dist.ops.order import tile_grid


class DenseLayers:
    """Their tensors, and their calls in a layer."""

    def __init__(
        self,
        g: Graph,
        of: DecoderSizes,
        shapes: Sequence[TileShape],
        sizes: Sequence[Expr],
    ) -> None:
        """of: those of the decoder. sizes: the rows, the steps, the layers and the
        hidden size."""
        self.g, self.dtype = g, of.dtype
        self.rows, self.steps, self.layers, self.hidden = sizes
        self.count, self.inner = g.dims("dense_layers dense_inner")
        self.others = g.dims("sparse_layers")
        self.tiles = {
            name: tiles_of_dims(
                *(g, f"{name}_", shapes, self.rows, of.w_layout(name)),
                has_peers=g.world_size > 1,
            )
            for name in DENSE_MATMULS
        }
        self.weights = {
            matmul: [
                weight_input(
                    *(g, name, of.w_layout(matmul), *shape, self.dtype),
                    stack=(self.count,),
                )
                for name in WEIGHTS[matmul]
            ]
            for matmul, shape in zip(
                DENSE_MATMULS,
                ((self.inner, self.hidden), (self.hidden, self.inner)),
                strict=True,
            )
        }
        self.no_rows = g.input("no_rows", (1, MOST_ROWS), "int32")
        self.active = g.local("dense_active", (self.rows, self.inner), self.dtype)

    def is_dense(self, layer: Expr) -> Expr:
        """1 for a dense layer, else 0."""
        return select(layer < self.count, 1, 0)

    def sparse(self, layer: Expr) -> Expr:
        """The number of a layer among those with experts."""
        return maximum(0, layer - self.count)

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

    def count_zeros(self) -> Expr:
        """The tasks of `fill_zeros`."""
        return ceildiv(self.rows, ROWS)

    def fill_zeros(self, outputs: Tensor, begin_event: EventRef) -> None:
        """Writes what layers add that have neither a shared expert nor an MLP."""
        (b,) = grid = self.g.grid(b=self.count_zeros())
        rows = span(b * ROWS, minimum(ROWS, self.rows - b * ROWS))
        self.g.call(
            ones_column(self.dtype, first=0),
            grid,
            name="fill_zeros",
            writes=[outputs[rows, :]],
            notifies=[begin_event],
        )

    def position_of(self, turn: Turn) -> Expr:
        """The row of positions that routing reads."""
        step, layer = turn
        return select(layer < self.count, self.steps + 1, step)

    def add(
        self, turn: Turn, x: Tensor, shared: SharedOutput, ready: EventRef
    ) -> SharedOutput:
        """Adds the MLP for the rows of x, complete after `ready`. Its outputs follow
        those of the shared expert. Returns those of the layer."""
        y = shared.rows
        up, down, rows = *DENSE_MATMULS, self.rows
        width = self.tiles[up].half_columns()
        to_active = self.active, 0, self.inner, width, swiglu
        done_event = self._multiply(up, turn, x, *to_active, ready)
        to_y = y, rows, self.hidden, self.tiles[down].columns, store
        done_event = self._multiply(down, turn, self.active, *to_y, done_event)
        return SharedOutput(
            y, rows * self.is_dense(turn[1]), [*shared.done, done_event]
        )

    def _multiply(
        self,
        name: str,
        turn: Turn,
        x: Tensor,
        y: Tensor,
        first: Expr | int,
        columns: Expr,
        width: Expr,
        epilogue: Epilogue,
        wait: EventRef,
    ) -> EventRef:
        """first: the row of y that belongs to the first row of x."""
        g, tiles, layer = self.g, self.tiles[name], turn[1]
        of = tile_grid(g, f"{name}_", (self.rows, columns), tiles.rows, width)
        start, is_dense = of.rows.start, layer < self.count
        count = self.is_dense(layer) * minimum(tiles.rows, self.rows - start)
        weight_layer = minimum(layer, self.count - 1)
        done_events = g.events(
            f"{name}_done", (self.steps, self.layers), expects=of.down * of.across
        )
        weights = tiles.weight_tiles(
            self.weights[name], of.columns, place=(weight_layer,)
        )
        g.call(
            tiles.matmul(self.dtype, epilogue, may_have_no_rows=True),
            of.grid,
            name=f"{name}_matmul",
            reads=[x[span(start, count), :], *weights],
            writes=[y[span(first + start, count), of.columns]],
            waits=[wait.when(is_dense)],
            notifies=[done_events[turn].when(is_dense)],
            order=of.order,
            values=tiles.values,
        )
        return done_events[turn].when(is_dense)
