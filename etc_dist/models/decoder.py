"""The graph of a decoder: a whole step, from token ids to the next ids.

Rows are positions of requests (`functions/append_kv.py`): those of a prompt, of
requests that are being decoded, or a mixture. The layers are the turns of a loop over
stacked weights, so that one program serves every depth.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from etc_dist.functions.add_ranks_norm import add_ranks_norm
from etc_dist.functions.append_kv import append_kv
from etc_dist.functions.attend import HEADS, attend
from etc_dist.functions.best_column import best_column, best_tile
from etc_dist.functions.check_rows import CHECKS, add_row_checks
from etc_dist.functions.combine_slices import combine_slices
from etc_dist.functions.epilogue import swiglu
from etc_dist.functions.push_rows import push_rows
from etc_dist.functions.rms_norm import add_rms_norm, rms_norm
from etc_dist.functions.tile_matmul import Tiles, TileShape
from etc_dist.ir import (
    EventRef,
    EventTensor,
    Expr,
    Graph,
    Region,
    Tensor,
    ceildiv,
    equal,
    graph_function,
    minimum,
    select,
    span,
    tile,
)
from etc_dist.models.decoder_ranks import Places, best_of_ranks, buffers_of_sums
from etc_dist.models.experts import EXPERT_MATMULS, MixtureCalls
from etc_dist.models.sizes import DecoderSizes
from etc_dist.ops.matmul_policy import SHAPES
from etc_dist.ops.order import tile_grid

BEST_COLUMNS = 1024
"""Logits of a row of which one task finds the largest; a multiple of 8."""
MANY_ROWS = 32
"""From so many rows on, a task combines the slices of all heads of a row."""


@graph_function
def decoder_graph(
    g: Graph,
    *,
    sizes: DecoderSizes,
    shapes: Sequence[TileShape] = SHAPES,
    best_columns: int = BEST_COLUMNS,
) -> None:
    """ids, request and position [rows], table [requests, most_pages] -> logits [rows,
    vocabulary] and next_ids [rows], the id with the largest of each row; cache is
    updated.

    Weights have the layer as first axis, norms as `norm` [layers + 1, hidden]: before
    attention of each layer, and the last one.

    On several ranks heads, inner width and the vocabulary of logits are split: `sizes`,
    weights, cache and logits are those of a rank, the embedding has all ids, and all
    ranks get the same next_ids."""
    step = _Step(g, sizes, shapes)
    step.check()
    step.embed()
    with g.loop(layer=step.layers) as layer:
        step.multiply("qkv", step.normed, step.qkv, step.ready[layer], layer)
        step.attend(layer)
        attended = step.done["combine"][layer]
        step.multiply("o", step.attention, step.deltas["o"], attended, layer)
        if step.mixture is None:
            step.add_mlp(layer)
        else:
            step.mix(step.mixture, layer)
    step.pick(best_columns)


class _Step:
    """The tensors of a step, and its calls."""

    def __init__(
        self, g: Graph, sizes: DecoderSizes, shapes: Sequence[TileShape]
    ) -> None:
        self.g, self.sizes, self.shapes = g, sizes, shapes
        self.rows, self.layers, self.hidden, self.inner = g.dims(
            "rows layers hidden inner"
        )
        self.vocabulary, self.slices = g.dims("vocabulary slices")
        self.all_ids = self.vocabulary
        if g.world_size > 1:
            self.all_ids = g.let("all_ids", g.world_size * self.vocabulary)
        self.shape = {
            name: g.dims(f"{name}_shape")
            for name in sizes.matmuls
            if name not in EXPERT_MATMULS
        }
        self.done: dict[str, EventTensor] = {}
        self._add_inputs()
        self._add_buffers()

    def _add_inputs(self) -> None:
        g, sizes, dtype = self.g, self.sizes, self.sizes.dtype
        layers, hidden, inner, dim = (
            self.layers,
            self.hidden,
            self.inner,
            sizes.head_dim,
        )
        positions, requests = g.dims("positions requests")
        most_pages, pages = g.dims("most_pages pages")
        self.ids = g.input("ids", (self.rows,), "int32")
        self.request = g.input("request", (self.rows,), "int32")
        self.position = g.input("position", (self.rows,), "int32")
        self.table = g.input("table", (requests, most_pages), "int32")
        self.cos_sin = g.input("cos_sin", (positions, dim), "float32")
        self.embedding = g.input("embedding", (self.all_ids, hidden), dtype)
        heads = sizes.heads * dim
        width = heads + 2 * sizes.kv_heads * dim
        self.gains = {
            "norm": g.input("norm", (layers + 1, hidden), dtype),
            "mlp_norm": g.input("mlp_norm", (layers, hidden), dtype),
        }
        if sizes.normalizes_heads:
            for name in ("q_norm", "k_norm"):
                self.gains[name] = g.input(name, (layers, dim), dtype)
        self.weights = {
            name: [g.input(of, (layers, rows, columns), dtype) for of in names]
            for name, names, rows, columns in (
                ("qkv", ("w_qkv",), width, hidden),
                ("o", ("w_o",), hidden, heads),
                ("gate_up", ("w_gate", "w_up"), inner, hidden),
                ("down", ("w_down",), hidden, inner),
            )
            if name in sizes.matmuls
        }
        self.weights["head"] = [g.input("w_head", (self.vocabulary, hidden), dtype)]
        self.cache = g.state(
            "cache", (layers, pages, 2, sizes.kv_heads, sizes.page_size, dim), dtype
        )
        self.logits = g.output("logits", (self.rows, self.vocabulary), dtype)
        self.next_ids = g.output("next_ids", (self.rows,), "int32")
        self.mixture: MixtureCalls | None = None
        if sizes.mixture is not None:
            of = self.rows, layers, hidden, inner
            self.mixture = MixtureCalls(
                g, sizes.mixture, dtype, self.shapes, of, self.position
            )

    def _add_buffers(self) -> None:
        g, sizes, rows, dtype = self.g, self.sizes, self.rows, self.sizes.dtype
        heads = sizes.heads * sizes.head_dim
        width = heads + 2 * sizes.kv_heads * sizes.head_dim
        # NOTE: one buffer serves all layers, since each phase waits for all of the one
        # before it.
        self.residual = g.local("residual", (rows, self.hidden), dtype)
        self.normed = g.local("normed", (rows, self.hidden), dtype)
        self.deltas = buffers_of_sums(g, ("o", "down"), (rows, self.hidden), dtype)
        self.qkv = g.local("qkv", (rows, width), dtype)
        self.attention = g.local("attention", (rows, heads), dtype)
        if self.mixture is None:
            self.active = g.local("active", (rows, self.inner), dtype)
        shape = rows, sizes.heads, self.slices
        self.sums = g.local("sums", (*shape, sizes.head_dim), "float32")
        self.stats = g.local("stats", (*shape, 2), "float32")
        self.ready = g.events(
            "ready",
            (self.layers + 1,),
            expects=lambda i: select(equal(i, 0), rows + CHECKS, rows),
        )
        self.middle = g.events("middle", (self.layers,), expects=rows)

    def check(self) -> None:
        """The errors of rows that are out of range. They end the run before it touches
        the cache."""
        places, notified = self._places(), [self.ready[0]]
        add_row_checks(self.g, self.sizes.page_size, places, self.cache, notified)

    def _places(self, rows: Any = slice(None)) -> list[Region]:
        of_rows = self.request[rows], self.position[rows]
        return [self.cos_sin[:, :], *of_rows, self.table[:, :]]

    def embed(self) -> None:
        """The rows of the ids, and their first norm."""
        g = self.g
        embedded = g.events("embedded", (self.rows,), expects=1)
        (r,) = grid = g.grid(r=self.rows)
        g.call(
            push_rows(),
            grid,
            name="embed",
            reads=[self.embedding[self.ids.load(r), :]],
            writes=[self.residual[r, :]],
            notifies=[embedded[r]],
        )
        own = span(r, 1), slice(None)
        g.call(
            rms_norm(self.sizes.dtype, self.sizes.norm_eps),
            grid,
            name="first_norm",
            reads=[self.residual[own], self.gains["norm"][0, :]],
            writes=[self.normed[own]],
            waits=[embedded[r]],
            notifies=[self.ready[0]],
        )

    def multiply(
        self, name: str, x: Tensor, y: Tensor, wait: EventRef, layer: Expr | None = None
    ) -> None:
        """y = x @ w.T, and events `name` that are met once it is complete. If y is
        symmetric, that of each rank at its place on all."""
        g, dtype = self.g, self.sizes.dtype
        tiles = Tiles(g, name, self.shape[name], self.shapes)
        weights = self.weights[name]
        to = Places(g, y)
        if len(weights) == 1:
            function, width = tiles.matmul(dtype, to.epilogue), tiles.columns
        else:
            function, width = tiles.matmul(dtype, swiglu), tiles.half_columns()
        shape = self.rows, y.shape[-1]
        of = tile_grid(g, f"{name}_", shape, tiles.rows, width)
        count = 1 if layer is None else self.layers
        self.done[name] = to.events(f"{name}_done", count, of.down * of.across)
        of_layer = () if layer is None else (layer,)
        g.call(
            function,
            of.grid,
            name=f"{name}_matmul",
            reads=[
                x[of.rows, :],
                *(w[(*of_layer, of.columns, slice(None))] for w in weights),
            ],
            writes=to.regions(of.rows, of.columns),
            waits=[wait],
            notifies=to.elements(self.done[name], 0 if layer is None else layer),
            order=of.order,
            values=tiles.values,
        )

    def attend(self, layer: Expr) -> None:
        """Appends to the cache of `layer`, and attends to it."""
        g, sizes, rows = self.g, self.sizes, self.rows
        dim, group, heads = sizes.head_dim, sizes.group, sizes.kv_heads
        appended = g.events("appended", (self.layers, heads), expects=1)
        # Slices are combined by one task for each head of the cache, or for each row.
        pieces = g.let("combine_pieces", select(rows < MANY_ROWS, heads, 1))
        each = g.let("combine_heads", select(rows < MANY_ROWS, 1, heads))
        tiles = -(-group // HEADS)
        attended = g.events(
            "attended",
            (self.layers, rows, pieces),
            expects=each * tiles * self.slices,
        )
        combined = g.events("combined", (self.layers,), expects=rows * pieces)
        self.done["combine"] = combined

        def gain(name: str) -> list[Region]:
            return [self.gains[name][layer, :]] if name in self.gains else []

        (h,) = grid = g.grid(h=heads)
        keys = [sizes.heads + h, sizes.heads + heads + h]
        g.call(
            append_kv(sizes.paged),
            grid,
            reads=[
                *(self.qkv[:, tile(n, dim)] for n in keys),
                *gain("k_norm"),
                *self._places(),
            ],
            writes=[self.cache[layer, :, :, h, :, :]],
            waits=[self.done["qkv"][layer]],
            notifies=[appended[layer, h]],
        )
        r, i, s = grid = g.grid(r=rows, i=heads * tiles, s=self.slices)
        own, kv_head, skipped = span(r, 1), i // tiles, i % tiles * HEADS
        first, count = kv_head * group + skipped, minimum(HEADS, group - skipped)
        of_heads = span(first, count)
        g.call(
            attend(sizes.paged),
            grid,
            reads=[
                self.qkv[own, span(first * dim, count * dim)],
                *gain("q_norm"),
                *self._places(own),
                self.cache[layer, :, :, kv_head, :, :],
            ],
            writes=[
                self.sums[own, of_heads, s, :],
                self.stats[own, of_heads, s, :],
            ],
            waits=[appended[layer, kv_head]],
            notifies=[attended[layer, r, kv_head // each]],
        )
        r, p = grid = g.grid(r=rows, p=pieces)
        own, of_piece = span(r, 1), tile(p, each * group)
        g.call(
            combine_slices(dim, sizes.dtype),
            grid,
            reads=[self.sums[own, of_piece, :, :], self.stats[own, of_piece, :, :]],
            writes=[self.attention[own, tile(p, each * group * dim)]],
            waits=[attended[layer, r, p]],
            notifies=[combined[layer]],
        )

    def add_mlp(self, layer: Expr) -> None:
        """The dense MLP of a layer."""
        middle, ready, y = self.middle[layer], self.ready[layer + 1], self.normed
        self.add_norm("mlp_norm", layer, "o", layer, middle, y)
        self.multiply("gate_up", y, self.active, middle, layer)
        activated = self.done["gate_up"][layer]
        self.multiply("down", self.active, self.deltas["down"], activated, layer)
        self.add_norm("norm", layer + 1, "down", layer, ready, y)

    def mix(self, mixture: MixtureCalls, layer: Expr) -> None:
        """The mixture of experts of a layer."""
        middle, ready = self.middle[layer], self.ready[layer + 1]
        self.add_norm("mlp_norm", layer, "o", layer, middle, mixture.x)
        ended = mixture.add(layer, middle)
        gain, eps = self.gains["norm"][layer + 1, :], self.sizes.norm_eps
        mixture.add_norm(layer, ended, ready, self.residual, gain, self.normed, eps)

    def add_norm(
        self,
        name: str,
        number: Expr,
        of: str,
        layer: Expr,
        notify: EventRef,
        y: Tensor,
    ) -> None:
        """Adds the results of matmul `of` to the residual, and normalizes it by gain
        `number` of `name`."""
        g, delta = self.g, self.deltas[of]
        (r,) = grid = g.grid(r=self.rows)
        own = span(r, 1), slice(None)
        is_sum = delta.kind == "symmetric"
        function = add_ranks_norm if is_sum else add_rms_norm
        added = delta[:, *own] if is_sum else delta[own]
        g.call(
            function(self.sizes.dtype, self.sizes.norm_eps),
            grid,
            name=f"add_{name}",
            reads=[added, self.residual[own], self.gains[name][number, :]],
            writes=[self.residual[own], y[own]],
            waits=[self.done[of][layer]],
            notifies=[notify],
        )

    def pick(self, best_columns: int) -> None:
        """The logits of each row, and their largest one."""
        g = self.g
        self.multiply("head", self.normed, self.logits, self.ready[self.layers])
        tiles = g.let("best_tiles", ceildiv(self.vocabulary, best_columns))
        values = g.local("best_values", (self.rows, tiles), "float32")
        columns = g.local("best_columns", (self.rows, tiles), "int32")
        found = g.events("found", (1,), expects=tiles)
        (j,) = grid = g.grid(j=tiles)
        g.call(
            best_column(self.sizes.dtype),
            grid,
            reads=[self.logits[:, tile(j, best_columns)]],
            writes=[values[:, j], columns[:, j]],
            waits=[self.done["head"][0]],
            notifies=[found[0]],
        )
        wait = found[0]
        if g.world_size > 1:
            values, columns, wait = best_of_ranks(
                g, (values, columns), best_columns, self.vocabulary, wait
            )
            best_columns = 0  # the columns are those of the whole vocabulary
        g.call(
            best_tile(best_columns),
            g.grid(one=1),
            reads=[values[:, :], columns[:, :]],
            writes=[self.next_ids[:]],
            waits=[wait],
        )
