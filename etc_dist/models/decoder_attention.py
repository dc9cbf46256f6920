"""Attention of a decoder's steps.

A task once a step divides the positions that all rows attend to into equal shares. In a
layer the keys and values of its rows are appended to the cache. Then the tasks of each
KV head attend to its shares. Rows that shares divide are combined: in a step whose
shares begin with rows there are none, and no task waits for it. Rows of prompts, which
are in blocks, are attended by others."""

from __future__ import annotations

from typing import Any

from etc_dist.functions.append_kv import append_kv
from etc_dist.functions.attend import HEADS, attend, written
from etc_dist.functions.attend_prompt import (
    HEAD_DIMS,
    attend_prompt,
    heads_of_block,
    rows_of_block,
)
from etc_dist.functions.combine_slices import combine_slices
from etc_dist.functions.plan_shares import (
    BOUND,
    EXTENT,
    MOST_ROWS,
    MOST_SHARES,
    plan_shares,
)
from etc_dist.ir import (
    EventRef,
    EventTensor,
    Expr,
    Graph,
    Region,
    Tensor,
    maximum,
    minimum,
    select,
    span,
    tile,
    up_to,
)
from etc_dist.ir.expr import wrap
from etc_dist.models.experts import Turn
from etc_dist.models.sizes import DecoderSizes

APPEND_ROWS, APPEND_PARTS = (256, 1024), (1, 4, 16)
"""From so many rows on, a KV head has so many tasks that append. A task with 2048 rows
took 66 us after its keys were there, on an H200."""
MANY_ROWS = 32
"""With at least so many rows, a task combines the slices of all heads of a row."""


class AttentionCalls:
    """The tensors of the attention of a decoder, and its calls.

    qkv [rows, (heads + 2 * kv_heads) * head_dim]: the rows of a layer, which are
    written before its calls. y [rows, heads * head_dim]: their attention."""

    def __init__(
        self,
        g: Graph,
        sizes: DecoderSizes,
        turns: tuple[Expr, Expr],
        request: Tensor,
        position: Tensor,
        early: bool,
    ) -> None:
        """turns: the steps, and the layers. request [rows] and position [steps + 1,
        rows]: of the rows. early: tasks may read operands before their last wait is
        met."""
        self.g, self.sizes, self.turns, self.early = g, sizes, turns, early
        self.request, self.position = request, position
        self.rows = request.shape[0]
        self.shares, self.of_task, self.cuts = g.dims("shares shares_of_task cuts")
        # The most blocks of rows; None if heads are too large for blocks.
        has_blocks = sizes.head_dim in HEAD_DIMS
        self.most_blocks = g.dims("most_blocks") if has_blocks else None
        dim, layers = sizes.head_dim, turns[1]
        positions, requests = g.dims("positions requests")
        most_pages, pages = g.dims("most_pages pages")
        self.table = g.input("table", (requests, most_pages), "int32")
        self.cos_sin = g.input("cos_sin", (positions, dim), "float32")
        self.q_cos_sin = self.cos_sin
        if sizes.features.scales_queries:
            self.q_cos_sin = g.input("q_cos_sin", (positions, dim), "float32")
        self.spans: Tensor | None = None
        if sizes.features.has_span:
            self.spans = g.input("spans", (layers, 2), "int32")
        self.sinks: Tensor | None = None
        if sizes.features.has_sinks:
            self.sinks = g.input("sinks", (layers, sizes.heads), "float32")
        self.gains: dict[str, Tensor] = {}
        if sizes.normalizes_heads:
            for name in ("q_norm", "k_norm"):
                self.gains[name] = g.input(name, (layers, dim), sizes.dtype)
        width = (sizes.heads + 2 * sizes.kv_heads) * dim
        self.bias: Tensor | None = None
        if sizes.features.qkv_bias:
            self.bias = g.input("qkv_bias", (layers, width), sizes.dtype)
        shape = layers, pages, 2, sizes.kv_heads, sizes.page_size, dim
        self.cache = g.state("cache", shape, sizes.dtype)
        self.qkv = g.local("qkv", (self.rows, width), sizes.dtype)
        self.y = g.local("attention", (self.rows, sizes.heads * dim), sizes.dtype)
        self._add_plan()

    def _add_plan(self) -> None:
        """The plans of each step, one for each layer if these have windows, and what
        the slices of shares give."""
        g, sizes, rows, shares = self.g, self.sizes, self.rows, self.shares
        num_steps, layers = self.turns
        self.plans: Expr | int = 1 if self.spans is None else layers
        of = num_steps, self.plans
        most = g.let("most_combined", select(self.cuts < 1, shares, rows))
        num_slots = g.let("slots", select(self.cuts < 1, 2 * shares, rows * self.cuts))
        self.extents = g.local("extents", (*of, rows, EXTENT), "int32")
        self.bounds = g.local("bounds", (*of, shares + 1, BOUND), "int32")
        self.combined = g.local("combined", (*of, most, 3), "int32")
        self.num_combined = g.local("num_combined", (*of, 1), "int32")
        self.most_combined = most
        self.blocks: Tensor | None = None
        if self.most_blocks is not None:
            shape = *of, 1 + self.most_blocks, 2
            self.blocks = g.local("blocks", shape, "int32")
        self.sums = g.local("sums", (num_slots, sizes.heads, sizes.head_dim), "float32")
        self.stats = g.local("stats", (num_slots, sizes.heads, 2), "float32")
        some = 1 if self.spans is None else maximum(1, layers)
        self.plan_events = g.events("planned", (num_steps,), expects=some)

    def plan(self, step: Expr, ready: EventRef) -> None:
        """Plans the shares of a step, once its rows are `ready`."""
        g = self.g
        every = span(0, minimum(MOST_ROWS, self.rows))
        bound = span(0, minimum(MOST_SHARES, self.shares) + 1)
        (n,) = grid = g.grid(plan=self.plans)
        blocks = [] if self.blocks is None else [self.blocks[step, n, :, :]]
        block_rows = rows_of_block(self.sizes.group) if blocks else 0
        g.call(
            plan_shares(self.sizes.paged, block_rows),
            grid,
            reads=self._places(step, n, every),
            writes=[
                *(self.extents[step, n, every, :], self.bounds[step, n, bound, :]),
                *(self.combined[step, n, :, :], self.num_combined[step, n, :]),
                *blocks,
            ],
            waits=[ready],
            notifies=[self.plan_events[step]],
            values={"lists": self.of_task},
        )

    def add(self, turn: Turn, rows_event: EventRef, ready: EventRef) -> EventRef:
        """Appends the keys and values of a layer to the cache, and attends to it, once
        qkv is `ready`. rows_event: after it the rows can be read. Returns the event
        after which y can be read; `planned[step]` orders what it loads."""
        appended = self._append(turn, rows_event, ready)
        attended = self._add_events()
        self._attend(turn, appended, attended)
        self._attend_blocks(turn, appended, attended)
        self._combine(turn, attended)
        return attended[*turn, 1]

    def _append(self, turn: Turn, rows_event: EventRef, ready: EventRef) -> EventTensor:
        g, sizes, (step, layer) = self.g, self.sizes, turn
        heads, dim = sizes.kv_heads, sizes.head_dim
        # Of many rows, a task stores those in some slots of each page.
        most = select(self.rows < APPEND_ROWS[1], APPEND_PARTS[1], APPEND_PARTS[2])
        num_parts = g.let("append_parts", select(self.rows < APPEND_ROWS[0], 1, most))
        num_slots = g.let("append_slots", sizes.page_size // num_parts)
        appended = g.events("appended", (*self.turns, heads), expects=num_parts)
        h, part = grid = g.grid(h=heads, part=num_parts)
        of_heads = [tile(sizes.heads + n * heads + h, dim) for n in range(2)]
        g.call(
            append_kv(sizes.paged, early=self.early),
            grid,
            reads=[
                *(self.qkv[:, columns] for columns in of_heads),
                *self._of_layer(layer, "k_norm", *of_heads),
                *self._places(step, layer),
            ],
            writes=[self.cache[layer, :, :, h, tile(part, num_slots), :]],
            waits=[*([rows_event] if self.early else []), ready],
            notifies=[appended[*turn, h]],
        )
        return appended

    def _add_events(self) -> EventTensor:
        """Events [steps, layers, 2]: 0 is met once all shares are computed, for the
        combination if there is any; 1 once that is complete, too."""
        g, num_tiles = self.g, -(-self.sizes.group // HEADS)
        self.tasks = g.let("share_tasks", self.shares // self.of_task)
        # With few rows, a task combines the slices of a KV head of a row, else of all.
        heads = self.sizes.kv_heads
        few = g.let("few_rows", select(self.rows < MANY_ROWS, 1, 0))
        self.together = g.let("combine_heads", select(few < 1, heads, 1))
        self.pieces = g.let("combine_pieces", heads // self.together)
        num_tasks = g.let("attend_tasks", heads * num_tiles * self.tasks)

        def expects(step: Expr, layer: Expr, n: Expr) -> Expr:
            plan = self._plan_of(layer)
            count = self.num_combined.load(step, plan, 0)
            every = num_tasks + count * self.pieces
            if self.blocks is not None and self.most_blocks is not None:
                of_blocks = self.blocks.load(step, plan, 0, 0) * heads * num_tiles
                every = select(self.most_blocks < 1, every, every + of_blocks)
            return select(n < 1, num_tasks, every)

        return g.events("attended", (*self.turns, 2), expects=expects)

    def _attend(self, turn: Turn, appended: EventTensor, attended: EventTensor) -> None:
        g, sizes, (step, layer) = self.g, self.sizes, turn
        num_tiles, plan = -(-sizes.group // HEADS), self._plan_of(layer)
        i, j = grid = g.grid(i=sizes.kv_heads * num_tiles, j=self.tasks)
        h, of_heads, columns = self._heads_of(i, HEADS)
        own_rows, own_slots = written(self.bounds, (step, plan), j, self.of_task)
        g.call(
            attend(sizes.paged, early=self.early),
            grid,
            reads=[
                self.qkv[:, columns],
                *self._of_layer(layer, "q_norm", columns),
                *(*self._span(layer), *self._sinks(layer, of_heads)),
                *(self.q_cos_sin[:, :], self.table[:, :]),
                self.cache[layer, :, :, h, :, :],
                *(self.extents[step, plan, :, :], self.bounds[step, plan, :, :]),
            ],
            writes=[
                *(z[span(*own_slots), of_heads, :] for z in (self.sums, self.stats)),
                self.y[span(*own_rows), columns],
            ],
            waits=[self.plan_events[step], appended[*turn, h]],
            notifies=[
                attended[*turn, 0].when(self.num_combined.load(step, plan, 0)),
                attended[*turn, 1],
            ],
            even=True,
        )

    def _attend_blocks(
        self, turn: Turn, appended: EventTensor, attended: EventTensor
    ) -> None:
        if self.blocks is None or self.most_blocks is None:
            return
        g, sizes, (step, layer) = self.g, self.sizes, turn
        width = heads_of_block(sizes.group)
        num_tiles, plan = -(-sizes.group // width), self._plan_of(layer)
        count = self.blocks.load(step, plan, 0, 0)
        b, i = grid = g.grid(
            b=up_to(self.most_blocks, count), i=sizes.kv_heads * num_tiles
        )
        h, of_heads, columns = self._heads_of(i, width)
        start, size = (self.blocks.load(step, plan, b + 1, n) for n in range(2))
        rows = span(start, minimum(rows_of_block(sizes.group), size))
        g.call(
            attend_prompt(sizes.paged),
            grid,
            reads=[
                self.qkv[rows, columns],
                *self._of_layer(layer, "q_norm", columns),
                *(*self._span(layer), *self._sinks(layer, of_heads)),
                *(self.q_cos_sin[:, :], self.table[:, :]),
                self.cache[layer, :, :, h, :, :],
                self.extents[step, plan, rows, :],
            ],
            writes=[self.y[rows, columns]],
            waits=[self.plan_events[step], appended[*turn, h]],
            notifies=[attended[*turn, 1]],
            even=True,
        )

    def _heads_of(self, i: Expr, width: int) -> tuple[Expr, Any, Any]:
        """The KV head of tile i of query heads, its up to `width` heads, and their
        columns."""
        dim, group = self.sizes.head_dim, self.sizes.group
        num_tiles = -(-group // width)
        h, first_of_group = i // num_tiles, i % num_tiles * width
        first = h * group + first_of_group
        num_queries = minimum(width, group - first_of_group)
        return h, span(first, num_queries), span(first * dim, num_queries * dim)

    def _combine(self, turn: Turn, attended: EventTensor) -> None:
        g, sizes, (step, layer) = self.g, self.sizes, turn
        plan, num_queries = self._plan_of(layer), self.together * sizes.group
        count = self.num_combined.load(step, plan, 0)
        n, p = grid = g.grid(n=up_to(self.most_combined, count), p=self.pieces)
        row, slot, slices = (self.combined.load(step, plan, n, k) for k in range(3))
        slots, of_heads = span(slot, slices), tile(p, num_queries)
        g.call(
            combine_slices(
                sizes.head_dim,
                sizes.dtype,
                has_sinks=self.sinks is not None,
                early=self.early,
            ),
            grid,
            reads=[
                *(self.sums[slots, of_heads, :], self.stats[slots, of_heads, :]),
                *self._sinks(layer, of_heads),
            ],
            writes=[self.y[row, tile(p, num_queries * sizes.head_dim)]],
            waits=[self.plan_events[step], attended[*turn, 0]],
            notifies=[attended[*turn, 1]],
            even=True,
        )

    def _of_layer(self, layer: Expr, gain: str, *columns: Any) -> list[Region]:
        """The biases of some columns, and the gain, of those that there are."""
        biases = [] if self.bias is None else [self.bias[layer, c] for c in columns]
        return [*biases, *([self.gains[gain][layer, :]] if self.gains else [])]

    def _places(self, step: Expr, layer: Expr, rows: Any = slice(None)) -> list[Region]:
        of_rows = self.request[rows], self.position[step, rows]
        return [*self._span(layer), self.cos_sin[:, :], *of_rows, self.table[:, :]]

    def _span(self, layer: Expr) -> list[Region]:
        return [] if self.spans is None else [self.spans[layer, :]]

    def _sinks(self, layer: Expr, heads: Any) -> list[Region]:
        return [] if self.sinks is None else [self.sinks[layer, heads]]

    def _plan_of(self, layer: Expr) -> Expr:
        """The plan of a layer."""
        return wrap(0) if self.spans is None else layer
