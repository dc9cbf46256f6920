"""The graph of a decoder: whole steps, from token ids to the next ids.

Rows are positions of requests (`functions/append_kv.py`): those of a prompt, of
requests that are being decoded, or a mixture. The layers are the turns of a loop over
stacked weights, so that one program serves every depth. Steps are the turns of a loop
around it: each continues the rows of the one before, until they end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from etc_dist.functions.best_column import best_column, next_token, unpadded_tile
from etc_dist.functions.copy_rows import copy_rows
from etc_dist.functions.epilogue import activated, soft_cap
from etc_dist.functions.push_rows import push_rows
from etc_dist.functions.rms_norm import (
    embed_norm,
    embed_rows,
    rms_norm,
)
from etc_dist.functions.sample_column import NUMBERS, least_kept, sample_column
from etc_dist.functions.scaled_weights import ScaledTensor, weight_input
from etc_dist.functions.tile_shape import TileShape
from etc_dist.ir import (
    EventRef,
    EventTensor,
    Expr,
    Graph,
    GraphFunction,
    Region,
    Tensor,
    ceildiv,
    graph_function,
    maximum,
    minimum,
    select,
    span,
)
from etc_dist.ir.function import TENSOR
from etc_dist.ir.tensor import numpy_dtype
from etc_dist.layers.shared_expert import SharedRows
from etc_dist.models.decoder_attention import AttentionCalls
from etc_dist.models.decoder_norms import norm_of_heads, norm_of_sum
from etc_dist.models.decoder_ranks import (
    best_of_ranks,
    buffers_of_sums,
    rows_of_ranks,
)
from etc_dist.models.dense_layers import DenseLayers, clear, num_clearings
from etc_dist.models.experts import (
    DENSE_MATMULS,
    EXPERT_MATMULS,
    SHARED_MATMULS,
    MixtureCalls,
    Turn,
)
from etc_dist.models.sizes import WEIGHTS, DecoderSizes
from etc_dist.models.step_policy import DIVIDED, step_shapes
from etc_dist.ops.multiply import AllTiles, TiledMatmul, Turns, tiles_of_dims
from etc_dist.ops.near_ranks import TilePlaces, here_and_on

BEST_COLUMNS = 1024
"""Logits of a row among which one task finds the largest; a multiple of 8."""


def decoder_for(schedule: str, ranks: int, sizes: DecoderSizes) -> GraphFunction:
    """The graph of a model under a schedule. Tasks of a dynamic program begin with all
    waits met, so they read nothing before the last one, and need no wait for what they
    would read."""
    return decoder_graph(ranks, sizes=sizes, early=schedule != "dynamic")


@graph_function
def decoder_graph(
    g: Graph,
    *,
    sizes: DecoderSizes,
    shapes: Sequence[TileShape] = (),
    best_columns: int = BEST_COLUMNS,
    early: bool = True,
) -> None:
    """`steps` steps of a model, for `rows` rows.

    Inputs, int32: ids, position, request and end [rows], which are read once and may be
    in mapped host memory; stop [rows, stops], sampling [rows, 5], table [requests,
    most_pages]. Those that depend on a model's configuration are `ModelConfig.tables`.
    State: cache. Results: next_ids [steps, outputs], int32, and logits [outputs,
    vocabulary] of the last step: those of the first `outputs` rows, of all rows if
    there are several steps.

    The rows are not checked: one out of range reads and writes nothing outside of the
    tensors, and its ids and logits have no meaning. `next_token` describes how rows
    end, and the ids of rows that have ended or whose logits are not finite. If the dim
    `samples` is 1, `sample_column` chooses tokens; if it is 0, the most likely ones are
    chosen. `plan_shares` and `attend` describe the dims shares, of each KV head,
    shares_of_task, cuts and, with heads of up to 128 elements, most_blocks.

    Weights have the layer as first axis. Those of `sizes.float8` are codes, and have
    fp32 scales for blocks of 128 x 128, NAME_scales. `norm` [layers + 1, hidden] has
    the gains before attention of each layer, then that of the final norm; [1, hidden]
    without `pre_norm`.

    On several ranks heads, inner width and the vocabulary of logits are split: `sizes`,
    weights, cache and logits are those of a rank. The embedding has all ids, and all
    ranks get the same next_ids. `vocabulary` is a multiple of 8, equal on all ranks:
    columns of logits after those of the `all_ids` ids are padding without effect.

    shapes: of tiles; by default those that `StepPolicy` chooses from. early: tasks may
    read operands before their last wait is met. They have one more wait, for these
    operands."""
    has_experts, is_float8 = sizes.mixture is not None, bool(sizes.float8)
    shapes = shapes or step_shapes(has_experts=has_experts, is_float8=is_float8)
    calls = _Calls(g, sizes, shapes, early)
    calls.take_rows()
    with g.loop(step=calls.steps) as step:
        calls.embed(step)
        calls.attention.plan(step, calls.step_events[step])
        with g.loop(layer=calls.layers) as layer:
            calls.add_layer((step, layer))
        calls.pick(step, best_columns)
    calls.finish()


class _Calls:
    """The tensors of a decoder, and its calls."""

    def __init__(
        self, g: Graph, sizes: DecoderSizes, shapes: Sequence[TileShape], early: bool
    ) -> None:
        self.g, self.sizes, self.shapes, self.early = g, sizes, shapes, early
        self.steps, self.samples = g.dims("steps samples")
        self.rows, self.layers, self.hidden, self.inner = g.dims(
            "rows layers hidden inner"
        )
        self.outputs, self.vocabulary = g.dims("outputs vocabulary")
        self.all_ids = g.dims("all_ids")
        before = g.rank * self.vocabulary
        num_later_ids = maximum(0, self.all_ids - before)
        self.first_id = g.let("first_id", before)
        self.num_ids = g.let("num_ids", minimum(self.vocabulary, num_later_ids))
        self.tiles = {
            name: tiles_of_dims(
                g,
                f"{name}_",
                shapes,
                self._rows_of(name),
                sizes.w_layout(name),
                has_peers=g.world_size > 1,
            )
            for name in sizes.matmuls
            if name not in EXPERT_MATMULS
        }
        self.matmul_events: dict[str, EventTensor] = {}
        self._add_inputs()
        self._add_buffers()

    def _add_inputs(self) -> None:
        g, sizes, dtype = self.g, self.sizes, self.sizes.dtype
        mixture, hidden, inner = sizes.mixture, self.hidden, self.inner
        has_shared = mixture is not None and bool(mixture.shared)
        shared_inner = g.dims("shared_inner") if has_shared else inner
        self._add_rows(g.dims("stops"))
        self.attention = AttentionCalls(
            g, sizes, (self.steps, self.layers), self.request, self.position, self.early
        )
        self.embedding = g.input("embedding", (self.all_ids, hidden), dtype)
        self._add_gains()
        self._add_weights(shared_inner)
        self.biases: dict[str, Tensor] = {}
        if sizes.features.o_bias:
            self.biases["o"] = g.input("o_bias", (self.layers, hidden), dtype)
        self.weights["head"] = [g.input("w_head", (self.vocabulary, hidden), dtype)]
        self.logits = g.state("logits", (self.outputs, self.vocabulary), dtype)
        self.next_ids = g.output("next_ids", (self.steps, self.outputs), "int32")
        self.mixture: MixtureCalls | None = None
        if mixture is not None:
            of = self.rows, self.steps, self.layers, hidden, inner
            self.mixture = MixtureCalls(
                g,
                mixture,
                dtype,
                self.shapes,
                of,
                self.position,
                self.early,
                self.dense,
                layouts=(sizes.w_layout("expert_up"), sizes.w_layout("expert_down")),
            )

    def _add_rows(self, stops: Expr) -> None:
        """The numbers of the rows, of which each has up to `stops` stop tokens."""
        g, mixture = self.g, self.sizes.mixture
        names = "request", "position", "end", "ids"
        self.row_inputs = [g.input(name, (self.rows,), "int32") for name in names]
        self.ids = g.local("step_ids", (self.steps + 1, self.rows), "int32")
        self.dense: DenseLayers | None = None
        if mixture is not None and mixture.has_dense:
            self.dense = DenseLayers(g, self.rows, self.steps)
        # Those of steps, and with dense layers a row for these.
        count = self.steps + (1 if self.dense is None else 2)
        self.position = g.local("step_position", (count, self.rows), "int32")
        self.request = g.local("row_request", (self.rows,), "int32")
        self.end = g.local("row_end", (self.rows,), "int32")
        self.stop = g.input("stop", (self.rows, stops), "int32")
        self.sampling = g.input("sampling", (self.rows, NUMBERS), "int32")

    def _add_gains(self) -> None:
        """Those of the norms."""
        g, sizes, layers = self.g, self.sizes, self.layers
        features = sizes.features
        gains = {"norm": layers + 1 if features.pre_norm else 1}
        of_layers = ["mlp_norm"] * features.pre_norm
        of_layers += ["post_norm", "post_mlp_norm"] * features.post_norm
        gains |= dict.fromkeys(of_layers, layers)
        self.gains = {
            name: g.input(name, (count, self.hidden), sizes.dtype)
            for name, count in gains.items()
        }
        if features.normalizes_all:
            for name, count in (("q", sizes.heads), ("k", sizes.kv_heads)):
                shape = layers, count * sizes.head_dim
                self.gains[name] = g.input(f"{name}_all_norm", shape, sizes.dtype)

    def _add_weights(self, shared_inner: Expr) -> None:
        """The weights of matmuls in layers, but for those of experts."""
        g, sizes, hidden, inner = self.g, self.sizes, self.hidden, self.inner
        dense_inner = inner if self.dense is None else self.dense.inner
        heads = sizes.heads * sizes.head_dim
        width = heads + 2 * sizes.kv_heads * sizes.head_dim
        self.weights: dict[str, list[Tensor | ScaledTensor]] = {
            name: [
                weight_input(
                    g,
                    of,
                    sizes.w_layout(name),
                    rows,
                    columns,
                    sizes.dtype,
                    stack=(self._layers_of(name),),
                )
                for of in WEIGHTS[name]
            ]
            for name, rows, columns in (
                ("qkv", width, hidden),
                ("o", hidden, heads),
                ("gate_up", inner, hidden),
                ("down", hidden, inner),
                ("shared_up", shared_inner, hidden),
                ("shared_down", hidden, shared_inner),
                ("dense_up", dense_inner, hidden),
                ("dense_down", hidden, dense_inner),
            )
            if name in sizes.matmuls
        }

    def _add_buffers(self) -> None:
        g, rows, dtype = self.g, self.rows, self.sizes.dtype
        # NOTE: one buffer serves all layers and steps, since each phase waits for all
        # of the one before it.
        self.residual = g.local("residual", (rows, self.hidden), dtype)
        self.normed = g.local("normed", (rows, self.hidden), dtype)
        self.deltas = buffers_of_sums(g, ("o", "down"), (rows, self.hidden), dtype)
        self.qkv = self.attention.qkv
        if self.mixture is None:
            self.active = g.local("active", (rows, self.inner), dtype)
        if "shared_up" in self.weights:
            shared_inner = self.weights["shared_up"][0].shape[1]
            self.shared_active = g.local("shared_active", (rows, shared_inner), dtype)
        if self.dense is not None:
            inner = self.dense.inner
            self.dense_active = g.local("dense_active", (rows, inner), dtype)
        if self.mixture is not None and self.mixture.shared:
            count = rows * (1 if self.dense is None else 2)
            self.shared_rows = g.local("shared_rows", (count, self.hidden), dtype)
        # The rows of each step: those of the first one are given.
        more: list[Expr | int] = [] if self.dense is None else [1]
        if self.dense is not None and "shared_up" not in self.weights:
            more.append(num_clearings(self.shared_rows))
        self.step_events = g.events(
            "begun",
            (self.steps + 1,),
            expects=lambda step: 1 + select(step < 1, sum(more), 0) if more else 1,
        )
        turns = self.steps, self.layers + 1
        self.ready = g.events("ready", turns, expects=rows)
        self.middle = g.events("middle", (self.steps, self.layers), expects=rows)

    def _rows_of(self, matmul: str) -> Expr:
        """The number of rows that a matmul multiplies."""
        rows: Expr = self.outputs if matmul == "head" else self.rows
        return rows

    def _layers_of(self, matmul: str) -> Any:
        """The layers that have a matmul."""
        if self.dense is None or matmul not in (*SHARED_MATMULS, *DENSE_MATMULS):
            return self.layers
        return self.dense.num_others if matmul in SHARED_MATMULS else self.dense.count

    def take_rows(self) -> None:
        """Copies the given rows, which are read once."""
        copies = self.request[:], self.position[0, :], self.end[:], self.ids[0, :]
        self.g.call(
            copy_rows(),
            self.g.grid(one=1),
            reads=[rows[:] for rows in self.row_inputs],
            writes=copies,
            notifies=[self.step_events[0]],
        )
        if self.dense is not None:
            self.dense.hide_rows(self.position, self.step_events[0])
            if "shared_up" not in self.weights:
                clear(self.g, self.shared_rows, self.step_events[0])

    def embed(self, step: Expr) -> None:
        """The embeddings of the ids, and the first norm."""
        g = self.g
        (r,) = grid = g.grid(r=self.rows)
        row = span(r, 1), slice(None)
        features, dtype = self.sizes.features, self.sizes.dtype
        has_norm, scale = features.pre_norm, np.array(features.embedding_scale)
        embed = embed_norm(
            dtype,
            self.sizes.norm_eps,
            scale=float(scale.astype(numpy_dtype(dtype))),
            offset=features.gain_offset,
        )
        g.call(
            embed if has_norm else embed_rows(dtype),
            grid,
            reads=[
                self.embedding[:, :],
                self.ids[step, span(r, 1)],
                *([self.gains["norm"][0, :]] if has_norm else []),
            ],
            writes=[self.residual[row], self.normed[row]],
            waits=[self.step_events[step]],
            notifies=[self.ready[step, 0]],
        )

    def add_layer(self, turn: Turn) -> None:
        self.multiply("qkv", self.normed, self.qkv, self.ready[turn], turn)
        if self.sizes.features.normalizes_all:
            names, turns = ("q", "k"), (self.steps, self.layers)
            gains = [self.gains[name] for name in names]
            self.matmul_events["qkv"] = norm_of_heads(
                self.g,
                self.qkv,
                gains,
                self.sizes.dtype,
                self.sizes.norm_eps,
                self.matmul_events["qkv"],
                turns,
                turn,
            )
        attention, qkv_done = self.attention, self.matmul_events["qkv"][turn]
        attended = attention.add(turn, self.ready[turn], qkv_done)
        plan_event = attention.plan_events[turn[0]]
        self.multiply("o", attention.y, self.deltas["o"], attended, turn, plan_event)
        if self.mixture is None:
            self.add_mlp(turn)
        else:
            self.mix(self.mixture, turn)

    def multiply(
        self,
        name: str,
        x: Tensor,
        y: Tensor,
        wait: EventRef,
        turn: tuple[Expr] | Turn,
        count_event: EventRef | None = None,
        first: Expr | int = 0,
    ) -> None:
        """y = x @ w.T; the events `done[name]` are met once it is complete. A symmetric
        y [ranks, ...] gets the result of each rank, on all ranks. turn: the step, and
        the layer if each layer has weights. count_event: after it the expected
        count of `wait` can be loaded. first: the row of y for the first row of x."""
        g, dtype, features = self.g, self.sizes.dtype, self.sizes.features
        weights = self.weights[name]
        of_layer: tuple[Expr, ...] = turn[1:]
        when, layer = None, turn[-1]
        if self.dense is not None and name in SHARED_MATMULS:
            of_layer = (self.dense.sparse(layer),)
        elif self.dense is not None and name in DENSE_MATMULS:
            of_layer, when = (self.dense.dense(layer),), self.dense.is_dense(layer)
        rows = self._rows_of(name)
        to = TilePlaces(g, y, rows, first)
        epilogue = to.epilogue
        if len(weights) == 2:
            epilogue = activated(features.activation)
        elif name == "head" and features.logit_cap is not None:
            epilogue = soft_cap(features.logit_cap)
        turns: tuple[Expr, ...] = (self.steps, self.layers)[: len(turn)]
        options: dict[str, Any] = {}
        if count_event is not None:
            options = {"even": True, "streams_after": 1 if self.early else None}
        matmul = TiledMatmul(
            g,
            f"{name}_",
            self.tiles[name],
            dtype,
            x,
            weights,
            to,
            epilogue,
            place=of_layer,
            turns=Turns(turns, turn),
            divides=name in DIVIDED and self.sizes.mixture is None,
            clips=not x.shape[0] is y.shape[-2] is rows,
            when=when,
            options=options,
        )
        done_events = to.events(f"{name}_done", turns, matmul.last_tasks)
        self.matmul_events[name] = done_events
        matmul.notify(here_and_on(to.peers, done_events, *turn))
        waits = AllTiles([wait] if count_event is None else [count_event, wait])
        matmul.add(waits, partial(matmul.add_whole_tiles, waits, call="matmul"))

    def add_mlp(self, turn: Turn) -> None:
        """The dense MLP of a layer."""
        step, layer = turn
        middle, ready, y = self.middle[turn], self.ready[step, layer + 1], self.normed
        self.add_norm("mlp_norm", layer, "o", turn, self.ready[turn], middle, y)
        self.multiply("gate_up", y, self.active, middle, turn)
        activated = self.matmul_events["gate_up"][turn]
        self.multiply("down", self.active, self.deltas["down"], activated, turn)
        self.add_norm("norm", layer + 1, "down", turn, middle, ready, y)

    def mix(self, mixture: MixtureCalls, turn: Turn) -> None:
        """The mixture of experts of a layer."""
        step, layer = turn
        middle, ready = self.middle[turn], self.ready[step, layer + 1]
        residual_event, x = self.ready[turn], mixture.x
        self.add_norm("mlp_norm", layer, "o", turn, residual_event, middle, x)
        routed = mixture.route(turn, middle)
        shared, has_shared = SharedRows(), "shared_up" in self.weights
        # NOTE: a shared expert's tasks come where those of others wait: for the
        # routing, and for each other.
        if has_shared:
            active, y = self.shared_active, self.shared_rows
            self.multiply("shared_up", x, active, middle, turn)
        waits = mixture.activate(turn, routed)
        if has_shared:
            activated = self.matmul_events["shared_up"][turn]
            self.multiply("shared_down", active, y, activated, turn)
            done_events = [self.matmul_events["shared_down"][turn]]
            shared = mixture.shared_rows(y, done_events)
        if self.dense is not None:
            y, active = self.shared_rows, self.dense_active
            self.multiply("dense_up", x, active, middle, turn)
            activated = self.matmul_events["dense_up"][turn]
            self.multiply("dense_down", active, y, activated, turn, first=self.rows)
            is_dense = self.dense.is_dense(layer)
            done_event = self.matmul_events["dense_down"][turn].when(is_dense)
            shared = replace(
                mixture.shared_rows(y, [*shared.done_events, done_event]),
                first=self.rows * select(is_dense, 1, 0),
            )
        waits = mixture.produce(turn, waits)
        if self.g.world_size > 1:
            parts = self.deltas["down"]
            self.matmul_events["down"] = mixture.send_sums(turn, waits, parts, shared)
            self.add_norm("norm", layer + 1, "down", turn, middle, ready, self.normed)
            return
        gain, eps = self.gains["norm"][layer + 1, :], self.sizes.norm_eps
        mixture.add_norm(
            turn, waits, shared, ready, self.residual, gain, self.normed, eps
        )

    def add_norm(
        self,
        name: str,
        number: Expr,
        of: str,
        turn: Turn,
        residual_event: EventRef,
        notify: EventRef,
        y: Tensor,
    ) -> None:
        """Adds the result of matmul `of` to the residual, and normalizes the sum into y
        with gain `number` of `name`. residual_event: after it that can be read."""
        g, delta = self.g, self.deltas[of]
        (r,) = grid = g.grid(r=self.rows)
        row_columns = span(r, 1), slice(None)
        is_sum, features = delta.kind == "symmetric", self.sizes.features
        bias = [self.biases[of][turn[1], :]] if of in self.biases else []
        gains = [self.gains[name][number, :]] if features.pre_norm else []
        if features.post_norm:
            post = {"o": "post_norm", "down": "post_mlp_norm"}[of]
            gains = [self.gains[post][turn[1], :], *gains]
        function = norm_of_sum(self.sizes, is_sum, bool(bias), self.early)
        is_early = bool(function.reads_before_wait)
        g.call(
            function,
            grid,
            name=f"add_{name}",
            reads=[
                delta[:, *row_columns] if is_sum else delta[row_columns],
                *(*bias, self.residual[row_columns], *gains),
            ],
            writes=[self.residual[row_columns], y[row_columns]],
            waits=[
                *([residual_event] if is_early else []),
                self.matmul_events[of][turn],
            ],
            notifies=[notify],
        )

    def normalize_last(self, step: Expr, wait: EventRef) -> EventRef:
        """The final norm, where the last layer ends without one."""
        g = self.g
        last = g.events("last_normed", (self.steps,), expects=self.rows)
        (r,) = grid = g.grid(r=self.rows)
        row = span(r, 1), slice(None)
        g.call(
            rms_norm(self.sizes.dtype, self.sizes.norm_eps),
            grid,
            reads=[self.residual[row], self.gains["norm"][0, :]],
            writes=[self.normed[row]],
            waits=[wait],
            notifies=[last[step]],
        )
        return last[step]

    def pick(self, step: Expr, best_columns: int) -> None:
        """The logits of the first rows, their largest ones, and the rows of the next
        step."""
        g, outputs = self.g, span(0, self.outputs)
        ready = self.ready[step, self.layers]
        if not self.sizes.features.pre_norm:
            ready = self.normalize_last(step, ready)
        self.multiply("head", self.normed, self.logits, ready, (step,))
        values, columns, wait = self._find_best(step, best_columns)
        if g.world_size > 1:
            values, columns, wait = best_of_ranks(
                g,
                (values, columns),
                best_columns,
                self.vocabulary,
                self.steps,
                step,
                wait,
            )
            best_columns = 0  # the columns are those of the whole vocabulary
        g.call(
            next_token(best_columns),
            g.grid(one=1),
            reads=[
                values[:, :],
                columns[:, :],
                self.position[step, outputs],
                self.end[outputs],
                self.stop[outputs, :],
            ],
            writes=[self.ids[step + 1, outputs], self.position[step + 1, outputs]],
            waits=[wait],
            notifies=[self.step_events[step + 1]],
        )

    def _find_best(
        self, step: Expr, best_columns: int
    ) -> tuple[Tensor, Tensor, EventRef]:
        """The largest logits of each row, one in each tile of `best_columns`: values,
        columns, and the event after which they are computed."""
        g = self.g
        num_tiles = g.let("best_tiles", ceildiv(self.vocabulary, best_columns))
        values = g.local("best_values", (self.outputs, num_tiles), "float32")
        columns = g.local("best_columns", (self.outputs, num_tiles), "int32")
        picks = g.events("found", (self.steps,), expects=num_tiles)
        num_greedy_tiles = g.let("greedy_tiles", select(self.samples < 1, num_tiles, 0))
        (j,) = grid = g.grid(j=num_greedy_tiles)
        g.call(
            best_column(self.sizes.dtype),
            grid,
            reads=[unpadded_tile(self.logits, j, best_columns, self.num_ids)],
            writes=[values[:, j], columns[:, j]],
            waits=[self.matmul_events["head"][step]],
            notifies=[picks[step]],
        )
        least, wait = self._find_least(step)
        (j,) = grid = g.grid(j=num_tiles - num_greedy_tiles)
        g.call(
            sample_column(self.sizes.dtype, best_columns),
            grid,
            reads=[
                unpadded_tile(self.logits, j, best_columns, self.num_ids),
                self.sampling[span(0, self.outputs), :],
                self.position[step, span(0, self.outputs)],
                least,
            ],
            writes=[values[:, j], columns[:, j]],
            waits=[wait],
            notifies=[picks[step]],
            values={"first": self.first_id},
        )
        return values, columns, picks[step]

    def _find_least(self, step: Expr) -> tuple[Region, EventRef]:
        """The smallest logit of each row that top_k and top_p keep, and the event that
        is met once those of all rows are known."""
        g, of_row, wait = self.g, self.logits, self.matmul_events["head"][step]
        sampled = g.let("sampled_rows", select(self.samples < 1, 0, self.outputs))
        if g.world_size > 1:
            of_row, wait = rows_of_ranks(g, of_row, sampled, self.steps, step, wait)
        least = g.local("least", (self.outputs,), "float32")
        limited = g.events("limited", (self.steps,), expects=sampled)
        (r,) = grid = g.grid(r=sampled)
        row = span(r, 1)
        g.call(
            least_kept(self.sizes.dtype),
            grid,
            reads=[of_row[row, span(0, self.all_ids)], self.sampling[row, :]],
            writes=[least[row]],
            waits=[wait],
            notifies=[limited[step]],
        )
        return least[:], limited[step]

    def finish(self) -> None:
        """Copies the ids of all steps to the output."""
        (s,) = grid = self.g.grid(s=self.steps)
        self.g.call(
            push_rows(TENSOR),
            grid,
            reads=[self.ids[span(s + 1, 1), span(0, self.outputs)]],
            writes=[self.next_ids[span(s, 1), :]],
            waits=[self.step_events[self.steps]],
        )
