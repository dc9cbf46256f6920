"""The steps of a mixture of experts, shared by its graphs on one and several ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from etc_dist.functions.choose_experts import choose_experts
from etc_dist.functions.combine_rows import GROUP_TOKENS
from etc_dist.functions.epilogue import activated
from etc_dist.functions.epilogue import logits as store_logits
from etc_dist.functions.list_rows import list_rows
from etc_dist.functions.locate_rows import locate_rows
from etc_dist.functions.pack_rows import PACKED_ROWS, TENSOR_ROWS, pack_rows
from etc_dist.functions.plan_tiles import TOGETHER, plan_tiles
from etc_dist.functions.router import Router
from etc_dist.functions.routing import BLOCK, PADDING, TILE_ROWS, Mixture, Routing
from etc_dist.functions.scaled_weights import ScaledTensor, row_regions, weight_input
from etc_dist.functions.score_experts import GROUP_EXPERTS, score_experts
from etc_dist.functions.tile_matmul import Tiles
from etc_dist.functions.tile_shape import TileShape
from etc_dist.functions.wide_tile import ROLES, STAGE_BYTES, WIDE, RowTiles
from etc_dist.ir import (
    EventRef,
    EventTensor,
    Expr,
    Graph,
    Region,
    Tensor,
    ceildiv,
    maximum,
    minimum,
    select,
    span,
    tile,
    up_to,
)
from etc_dist.ir.function import TENSOR, TRANSFER
from etc_dist.ops.multiply import Matrix

PASSES = 2
"""The largest number of passes over the output columns. One is combined while the next
is computed. More passes shorten the tail, but a tile's activations are read again in
each."""
SCORE_TASKS = 132
"""The largest number of tasks that compute logits for groups of experts, about one per
worker. Where many tokens would need more, logits are computed in tiles by GEMMs."""
TILE_BLOCKS, TILE_EXPERTS = 2, 128
"""Blocks of tokens, and experts, of a tile of logits."""
LOGITS = TileShape(TILE_BLOCKS * BLOCK, TILE_EXPERTS, swapped=True)
PART_GROUPS, PARTS = 2, 4
"""Groups of tiles in a part, and the largest number of parts. Each part has an event
for its copied rows. The last one has all further groups. The tensor lane copies the
rows of the first one, since the first projection waits for it."""
ONE_EXPERT = Mixture(1, Router(1))
Weight = Tensor | ScaledTensor


@dataclass(frozen=True)
class Sizes:
    """Tile sizes, task counts, and what else the steps of a graph have in common. Those
    up to group_tokens are fixed on the GPU. On the CPU backend they are free, but block
    is at most 32 and a multiple of group_tokens."""

    block: int = BLOCK
    tile_rows: int = TILE_ROWS
    up_columns: int = WIDE.columns // 2
    tile_columns: int = WIDE.columns
    group_tokens: int = GROUP_TOKENS
    passes: int = PASSES
    part_tokens: int = 16
    """The largest number of tokens of a task that sends sums to another rank."""
    push_tasks: int = 128
    """Blocks of tokens are divided to make about this many tasks that push them."""
    score_tasks: int = SCORE_TASKS
    combined: int = 256
    """Columns that a warp combines in one step."""
    in_order: bool = False
    """Whether each sum adds k in one order for any number of tokens. Otherwise the
    logits of many tokens are computed in tiles, and few tokens are multiplied by
    float8 weights in smaller tiles, which add k in another order."""
    w_layout: str = "nk"
    """Of the weights of experts: "nk", or one of SCALINGS for float8 with scales."""
    packs: bool = False
    """Whether rows of x are first copied to their tiles. Otherwise each task of the
    first projection gathers its own, which is slower if an expert has many columns."""
    mixture: Mixture = ONE_EXPERT
    has_count: bool = False
    """Whether an input has the number of tokens, where that differs between ranks."""


@dataclass(frozen=True)
class Choices:
    """The experts of a rank's tokens, their weights, and the tokens of each expert."""

    ids: Tensor
    weights: Tensor
    token_bits: Tensor


@dataclass(frozen=True)
class ExpertTiles:
    """Rows by expert, divided into tiles; valid after `plan_event`."""

    expert: Tensor
    row: Tensor
    rows: Tensor
    first: Tensor
    before: Tensor
    expert_row: Tensor
    tokens: Tensor
    num_groups: Tensor
    total: Expr
    most: int
    """The largest number of rows of a tile."""
    plan_event: EventRef

    def of(self, r: Expr) -> tuple[Expr, Expr, Expr]:
        """Tile r's expert, first row and number of rows."""
        rows = minimum(self.most, self.rows.load(r))
        return self.expert.load(r), self.row.load(r), rows

    def numbers(self, r: Expr, size: Expr, start: Expr | int = 0) -> Region:
        """The tokens of `size` rows of tile r, after the first `start`."""
        return self.tokens[span(self.first.load(r) + start, size)]


@dataclass(frozen=True)
class ExpertOutputs:
    """The experts' output rows. Pass s of the columns is valid after `produced[s]`.
    before: events for which the tasks of `add_places` must wait, too: on a rank without
    tiles no other task does."""

    rows: Tensor
    produced: EventTensor
    passes: Expr
    pass_columns: Expr
    before: Sequence[EventRef]


def add_inputs(
    g: Graph,
    routing: Routing,
    tokens: Expr,
    hidden: Expr,
    inner: Expr,
    own_experts: int | None = None,
    w_layout: str = "nk",
) -> tuple[Tensor, Tensor, Weight, Weight]:
    """x, router, gate_up, down; gate_up and down have `own_experts` if given."""
    dtype, stack = routing.dtype, (own_experts or routing.experts,)
    return (
        g.input("x", (tokens, hidden), dtype),
        g.input("router", (routing.experts, hidden), dtype),
        weight_input(g, "gate_up", w_layout, 2 * inner, hidden, dtype, stack),
        weight_input(g, "down", w_layout, hidden, inner, dtype, stack),
    )


def add_biases(g: Graph, routing: Routing) -> list[Region]:
    """The inputs router_bias and correction [experts], where the router has them."""
    names = routing.router.bias_names
    return [g.input(name, (routing.experts,), "float32")[:] for name in names]


def add_logits(g: Graph, routing: Routing, tokens: Expr, name: str = "") -> Tensor:
    """The logits [tokens, experts], with further columns to a multiple of 8."""
    columns = -(-routing.experts // 8) * 8
    return g.local(f"{name}logits", (tokens, columns), "float32")


def add_scores(
    g: Graph,
    routing: Routing,
    x: Tensor,
    router: Matrix,
    logits: Tensor,
    sizes: tuple[Expr, Expr | int, Expr | int],
    notify: Callable[[Expr], EventRef],
    name: str = "score_experts",
    *,
    waits: Sequence[EventRef] = (),
    early: bool = False,
    most: int = GROUP_EXPERTS,
) -> None:
    """Add the logits of x, which may have more rows. sizes: the numbers of blocks of
    tokens, of groups of experts, and of a group's experts. notify: a block's event.
    most: experts of a group, if their number is not known."""
    (blocks, groups, size), rows, block = sizes, logits.shape[0], routing.block
    most = size if isinstance(size, int) else most
    b, e = grid = g.grid(b=blocks, e=groups)
    of_block, of_group = tile(b, block), tile(e, size)
    if x.shape[0] is not rows:
        of_block = span(b * block, minimum(block, rows - b * block))
    g.call(
        score_experts(routing, most, early=early),
        grid,
        name=name,
        reads=[x[of_block, :], router.at(of_group, slice(None))],
        writes=[logits[of_block, of_group]],
        waits=waits,
        notifies=[notify(b)],
    )


def add_choices(
    g: Graph,
    routing: Routing,
    x: Tensor,
    router: Tensor,
    blocks: Expr,
    routed: EventTensor,
    sizes: Sizes,
) -> Choices:
    """Add the router: x [tokens, hidden] -> the choices of all tokens. `routed` has one
    event per block of tokens, or one for all blocks. The choices have rows for the
    largest number of tokens of all ranks, those without a token the id NONE."""
    has_events = routed.shape == (blocks,)
    rows, tokens = x.shape[0], g.largest(x.shape[0])
    experts, top_k, block = routing.experts, routing.top_k, routing.block
    logits, biases = add_logits(g, routing, rows), add_biases(g, routing)
    ids = g.local("ids", (tokens, top_k), "int32")
    weights = g.local("weights", (tokens, top_k), "float32")
    token_bits = g.local("chosen", (experts, blocks), "int32")
    # Groups of 8, 16 or GROUP_EXPERTS experts: the smallest with a task per worker.
    most, wide = sizes.score_tasks, ceildiv(experts, TILE_EXPERTS)
    over = [minimum(1, blocks * ceildiv(experts, n) // (most + 1)) for n in (8, 16)]
    size = g.let("scored_experts", 8 + 8 * over[0] + (GROUP_EXPERTS - 16) * over[1])
    num_groups = g.let("score_groups", ceildiv(experts, size))
    # 1 if logits are computed in tiles, else 0.
    tiled = g.let(
        "tiled", minimum(int(not sizes.in_order), blocks * num_groups // (most + 1))
    )
    expects = g.let("logit_tasks", num_groups + tiled * (wide - num_groups))
    scored = g.events("scored", (blocks,), expects=expects)
    groups_of = g.let("score_blocks", (1 - tiled) * blocks), num_groups, size
    add_scores(g, routing, x, Matrix(router), logits, groups_of, lambda b: scored[b])
    if not sizes.in_order:
        tiles = g.let("logit_tiles", tiled * ceildiv(blocks, TILE_BLOCKS))
        n, e = grid = g.grid(n=tiles, e=wide)
        of_tile = tile(n, TILE_BLOCKS * block)
        of_group = tile(e, TILE_EXPERTS)
        of_logits = Tiles(g, "logit", 0, [LOGITS], stage_bytes=STAGE_BYTES)
        g.call(
            replace(of_logits.matmul(routing.dtype, store_logits), roles=ROLES),
            grid,
            name="score_tiles",
            values=of_logits.values,
            reads=[x[of_tile, :], router[of_group, :]],
            writes=[logits[of_tile, of_group]],
            notifies=[scored[n]],
        )
    # If all tiles are whole, the blocks of each become ready together.
    whole = g.let("whole_tiles", tiled * (1 - minimum(1, blocks % TILE_BLOCKS)))
    together = g.let("tile_blocks", 1 + (TILE_BLOCKS - 1) * whole)
    n, i = grid = g.grid(n=g.let("chosen_tiles", blocks // together), i=together)
    block_idx = n * together + i
    of_block = tile(block_idx, block)
    count = []
    if sizes.has_count:
        # The length of the second region is the number of tokens before.
        count = [
            g.input("count", (1,), "int32")[:],
            x[span(0, block_idx * block), span(0, 1)],
        ]
    g.call(
        choose_experts(
            routing, marks=True, fills=rows != tokens, has_count=sizes.has_count
        ),
        grid,
        reads=[logits[of_block, span(0, experts)], *count, *biases],
        writes=[*(t[of_block, :] for t in (ids, weights)), token_bits[:, block_idx]],
        waits=[scored[n - (tiled - whole) * (n - n // TILE_BLOCKS)]],
        notifies=[routed[block_idx if has_events else 0]],
    )
    return Choices(ids, weights, token_bits)


def add_tiles(
    g: Graph,
    routing: Routing,
    token_bits: Tensor,
    choices: Expr,
    waits: Sequence[EventRef],
) -> ExpertTiles:
    """Add the tiles of the rows in token_bits [experts, blocks], at most `choices`."""
    experts, blocks = routing.experts, token_bits.shape[1]
    choices = g.let("choices", choices)
    # The most tiles that any routing needs, in whole groups.
    bound = minimum(choices, experts + choices // routing.tile_rows)
    tiles = g.let("tiles", TOGETHER * ceildiv(bound, TOGETHER))
    total = g.let("rows", choices + PADDING * tiles)
    before = g.local("before", token_bits.shape, "int32")
    counts = g.local("counts", (experts,), "int32")
    expert_row = g.local("expert_row", (experts,), "int32")
    most = g.let("most_rows", blocks * routing.block)  # of an expert
    tokens = g.local("expert_tokens", (experts * most,), "int32")
    expert, row, rows, first = (
        g.local(f"tile_{name}", (tiles,), "int32")
        for name in ("expert", "row", "rows", "first")
    )
    num_groups = g.local("groups_needed", (1,), "int32")
    list_events = g.events("listed", (1,), expects=experts)
    plan_events = g.events("planned", (1,), expects=1)
    (e,) = grid = g.grid(e=experts)
    g.call(
        list_rows(routing),
        grid,
        reads=[token_bits[e, :]],
        writes=[before[e, :], tokens[tile(e, most)], counts[e]],
        waits=waits,
        notifies=[list_events[0]],
    )
    g.call(
        plan_tiles(routing),
        g.grid(one=1),
        reads=[counts[:], tokens[span(0, most)]],
        writes=[t[:] for t in (expert_row, expert, row, rows, first, num_groups)],
        waits=[list_events[0]],
        notifies=[plan_events[0]],
    )
    return ExpertTiles(
        expert,
        row,
        rows,
        first,
        before,
        expert_row,
        tokens,
        num_groups,
        total,
        routing.tile_rows,
        plan_events[0],
    )


def row_tiles(
    g: Graph, sizes: Sizes, tokens: Expr, name: str = ""
) -> tuple[RowTiles, RowTiles]:
    """The tiles of the first and of the second projection. Where ranks exchange
    `tokens`, their capacity counts. name: the prefix of their names."""
    up, down = (
        RowTiles(
            g,
            f"{name}{which}",
            tokens,
            columns,
            gated=gated,
            w_layout=sizes.w_layout,
            in_order=sizes.in_order,
        )
        for which, columns, gated in (
            ("up", 2 * sizes.up_columns, True),
            ("down", sizes.tile_columns, False),
        )
    )
    return up, down


def add_projections(
    g: Graph,
    routing: Routing,
    sizes: Sizes,
    x: Tensor,
    tiles: ExpertTiles,
    gate_up: Weight,
    down: Weight,
    waits: Sequence[EventRef] = (),
) -> ExpertOutputs:
    """Add both projections. After `waits`, the first one gathers its rows of x, or they
    are first copied to their tiles."""
    _, hidden, inner = down.shape
    of_up, of_down = row_tiles(g, sizes, x.shape[0])
    up_columns, tile_columns = of_up.task_columns(gated=True), of_down.task_columns()
    wide = g.let("wide", ceildiv(inner, up_columns))
    columns = g.let("columns", ceildiv(hidden, tile_columns))
    per = g.let("per", ceildiv(columns, sizes.passes))
    num_passes = g.let("passes", ceildiv(columns, per))
    (count,), rows = tiles.expert.shape, tiles.total
    active = g.local("active", (rows, inner), routing.dtype)
    outputs = g.local("outputs", (rows, hidden), routing.dtype)
    num_groups = g.let("tile_groups", count // TOGETHER)
    num_needed = tiles.num_groups.load(0)
    activated_events = g.events("activated", (num_groups, TOGETHER), expects=wide)
    produced = g.events(
        "produced", (num_passes,), expects=lambda s: num_needed * (TOGETHER * per)
    )

    gate_up_bias, down_bias = None, None
    if sizes.mixture.has_biases:
        shape = routing.experts, 2 * inner
        gate_up_bias = g.input("gate_up_bias", shape, routing.dtype)
        down_bias = g.input("down_bias", (routing.experts, hidden), routing.dtype)
    before = _project_up(
        g,
        routing,
        sizes,
        of_up,
        x,
        tiles,
        gate_up,
        gate_up_bias,
        active,
        activated_events,
        wide,
        waits,
    )
    s, q, i, j = grid = g.grid(
        s=num_passes, q=up_to(num_groups, num_needed), i=TOGETHER, j=per
    )
    r = q * TOGETHER + i
    expert, row, size = tiles.of(r)
    of_column = tile(s * per + j, tile_columns)
    g.call(
        of_down.matmul_rows(routing.dtype, is_biased=sizes.mixture.has_biases),
        grid,
        name="down_projection",
        values=of_down.values,
        reads=[
            active[span(row, size), :],
            *row_regions(down, (expert,), [of_column]),
            *([] if down_bias is None else [down_bias[expert, of_column]]),
        ],
        writes=[outputs[span(row, size), of_column]],
        waits=[tiles.plan_event, activated_events[q, i]],
        notifies=[produced[s]],
    )
    return ExpertOutputs(outputs, produced, num_passes, per * tile_columns, before)


def _project_up(
    g: Graph,
    routing: Routing,
    sizes: Sizes,
    of_up: RowTiles,
    x: Tensor,
    tiles: ExpertTiles,
    gate_up: Weight,
    bias: Tensor | None,
    active: Tensor,
    activated_events: EventTensor,
    wide: Expr,
    waits: Sequence[EventRef],
) -> Sequence[EventRef]:
    """Add the first projection, which stores `active`, `wide` tasks wide. Returns the
    events after which x has been read."""
    up_columns, inner = of_up.task_columns(gated=True), active.shape[1]
    num_groups, num_needed = activated_events.shape[0], tiles.num_groups.load(0)
    q, j, i = grid = g.grid(q=up_to(num_groups, num_needed), j=wide, i=TOGETHER)
    r = q * TOGETHER + i
    expert, row, size = tiles.of(r)
    start_column = j * up_columns
    width = minimum(up_columns, inner - start_column)
    halves = [span(n + start_column, width) for n in (0, inner)]
    weights = row_regions(gate_up, (expert,), halves)
    if bias is not None:
        weights += [bias[expert, half] for half in halves]
    before: Sequence[EventRef] = waits
    if sizes.packs:
        packed, ready = _pack_rows(g, routing, x, tiles, waits)
        reads, waits = [packed[span(row, size), :], *weights], [ready[_part_of(q)]]
        last = maximum(0, ready.shape[0] - 1)  # repeated if there are fewer parts
        before = [ready[minimum(n, last)] for n in range(PARTS)]
    else:
        reads = [_some_of(x, size), *weights, tiles.numbers(r, size)]
    g.call(
        of_up.matmul_rows(
            routing.dtype,
            activated(sizes.mixture.activation),
            gathers=not sizes.packs,
            is_biased=sizes.mixture.has_biases,
        ),
        grid,
        name="gate_up_projection",
        values=of_up.values,
        reads=reads,
        writes=[active[span(row, size), span(start_column, width)]],
        waits=[tiles.plan_event, *waits],
        notifies=[activated_events[q, i]],
    )
    return before


def _pack_rows(
    g: Graph, routing: Routing, x: Tensor, tiles: ExpertTiles, waits: Sequence[EventRef]
) -> tuple[Tensor, EventTensor]:
    """Add tasks that copy rows of x to `packed`, in the order of the tiles. After
    event n those of part n are copied."""
    num_groups = tiles.expert.shape[0] // TOGETHER
    packed = g.local("packed", (tiles.total, x.shape[1]), routing.dtype)
    first = g.let("first_packed", minimum(num_groups, PART_GROUPS))
    # Tasks of a tile: few on the tensor lane, which copies the first part.
    few, many = (-(-tiles.most // n) for n in (TENSOR_ROWS, PACKED_ROWS))

    def expected(n: Expr) -> Expr:
        most = select(n < PARTS - 1, PART_GROUPS, num_groups)
        size = minimum(most, num_groups - n * PART_GROUPS)
        return TOGETHER * size * select(n < 1, few, many)

    parts = g.let("packed_parts", minimum(PARTS, ceildiv(num_groups, PART_GROUPS)))
    ready = g.events("packed_groups", (parts,), expects=expected)
    for lane, name, begin, count, rows, tasks in (
        (TENSOR, "pack_first_rows", 0, first, TENSOR_ROWS, few),
        (TRANSFER, "pack_rows", first, num_groups - first, PACKED_ROWS, many),
    ):
        n, i, c = grid = g.grid(q=count, i=TOGETHER, c=tasks)
        q = begin + n
        r = q * TOGETHER + i
        _, row, size = tiles.of(r)
        start = minimum(size, c * rows)
        some = minimum(size - start, rows)
        g.call(
            pack_rows(routing.dtype, lane),
            grid,
            name=name,
            reads=[_some_of(x, some), tiles.numbers(r, some, start)],
            writes=[packed[span(row + start, some), :]],
            waits=[tiles.plan_event, *waits],
            notifies=[ready[_part_of(q)]],
        )
    return packed, ready


def _part_of(q: Expr) -> Expr:
    """The part of group q."""
    return minimum(q // PART_GROUPS, PARTS - 1)


def _some_of(x: Tensor, size: Expr) -> Region:
    """All rows of x. If other tasks write x: none for a task of size 0.

    NOTE: peers write x a few rows per task. The proof skips loaded regions, so it does
    not compare all tasks with all rows."""
    if x.kind == "input":
        return x[:, :]
    return x[span(0, x.shape[0] * maximum(minimum(size, 1), 0)), :]


def add_places(
    g: Graph,
    routing: Routing,
    choices: Choices,
    tiles: ExpertTiles,
    tokens: Expr,
    lower: Sequence[Region] = (),
    waits: Sequence[EventRef] = (),
) -> tuple[Tensor, EventRef]:
    """Add the location of each token's rows: place, of the shape of ids, and the event
    after which it is valid. tokens: those of each rank whose choices these are. waits:
    also for these events, for which no other task waits on a rank without tiles."""
    token_bits, ids, block = choices.token_bits, choices.ids, routing.block
    blocks = token_bits.shape[1]
    place = g.local("place", ids.shape, "int32")
    located = g.events("located", (1,), expects=blocks)
    (b,) = grid = g.grid(b=blocks)
    of_block = tile(b, block)
    if routing.split:
        num_tokens = tokens - b % ceildiv(tokens, block) * block
        of_block = span(b * block, minimum(block, num_tokens))
    g.call(
        locate_rows(routing),
        grid,
        reads=[
            ids[of_block, :],
            *(t[:, b] for t in (token_bits, tiles.before)),
            tiles.expert_row[:],
            *lower,
        ],
        writes=[place[of_block, :]],
        waits=[tiles.plan_event, *waits],
        notifies=[located[0]],
    )
    return place, located[0]
