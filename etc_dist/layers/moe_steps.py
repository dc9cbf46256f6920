"""The steps of a mixture of experts, which its graphs on one rank and on many share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from etc_dist.functions.choose_experts import choose_experts
from etc_dist.functions.grouped_matmul import grouped_gated, grouped_store, thin_float
from etc_dist.functions.list_rows import list_rows
from etc_dist.functions.locate_rows import locate_rows
from etc_dist.functions.plan_tiles import plan_tiles
from etc_dist.functions.routing import PADDING, Routing
from etc_dist.functions.score_experts import GROUP_EXPERTS, score_experts
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
from etc_dist.ops.order import grouped_rows

TILES_TOGETHER = 2
"""Tiles of rows that take turns at the same columns of an expert's weights, which may
be more than the L2 cache holds."""
SCORE_TASKS = 132
"""Tasks at most that compute logits for groups of experts, about one for each worker.
Where many tokens would make more, logits are computed in tiles, as products are."""
TILE_BLOCKS, TILE_EXPERTS = 4, 128
"""Blocks of tokens, and experts, of which a tile has the logits."""
MANY_TOKENS = 17
"""Of fewer, a task has half as many columns, so that more workers read weights. Where
ranks exchange tokens there is room for more."""


@dataclass(frozen=True)
class Sizes:
    """How the work is cut, beside what `Routing` says."""

    passes: int
    up_columns: int
    tile_columns: int
    group_tokens: int
    part_tokens: int
    push_tasks: int
    score_tasks: int
    combined: int


@dataclass(frozen=True)
class Choices:
    """What each token picked, of the tokens of a rank."""

    ids: Tensor
    weights: Tensor
    chosen: Tensor


@dataclass(frozen=True)
class Tiles:
    """Rows by expert, cut into tiles; all of it is known once `planned` is met."""

    expert: Tensor
    row: Tensor
    rows: Tensor
    first: Tensor
    before: Tensor
    expert_row: Tensor
    tokens: Tensor
    total: Expr
    most: int
    """Rows of a tile at most."""
    planned: EventRef

    def of(self, r: Expr) -> tuple[Expr, Expr, Expr]:
        """Tile r's expert, first row and number of rows."""
        rows = minimum(self.most, self.rows.load(r))
        return self.expert.load(r), self.row.load(r), rows


@dataclass(frozen=True)
class Product:
    """The experts' rows; `produced[s]` is met once those columns are there."""

    rows: Tensor
    produced: EventTensor
    passes: Expr
    pass_columns: Expr


def add_inputs(
    g: Graph,
    routing: Routing,
    tokens: Expr,
    hidden: Expr,
    inner: Expr,
    own_experts: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, router, gate_up, down; of these two this rank may have its own experts'."""
    dtype, experts = routing.dtype, own_experts or routing.experts
    return (
        g.input("x", (tokens, hidden), dtype),
        g.input("router", (routing.experts, hidden), dtype),
        g.input("gate_up", (experts, 2 * inner, hidden), dtype),
        g.input("down", (experts, hidden, inner), dtype),
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
    """Add the router: x [tokens, hidden] -> the choices of all tokens. `routed` has an
    event for each block of them, or one for all."""
    each = routed.shape == (blocks,)
    tokens = x.shape[0]
    experts, top_k, block = routing.experts, routing.top_k, routing.block
    logits = g.local("logits", (tokens, experts), "float32")
    ids = g.local("ids", (tokens, top_k), "int32")
    weights = g.local("weights", (tokens, top_k), "float32")
    chosen = g.local("chosen", (experts, blocks), "int32")
    # Groups of 8, 16 or GROUP_EXPERTS experts: as small as leave a worker one task.
    most, wide = sizes.score_tasks, ceildiv(experts, TILE_EXPERTS)
    over = [minimum(1, blocks * ceildiv(experts, n) // (most + 1)) for n in (8, 16)]
    size = g.let("scored_experts", 8 + 8 * over[0] + (GROUP_EXPERTS - 16) * over[1])
    groups = g.let("score_groups", ceildiv(experts, size))
    # 1 where logits are computed in tiles, else 0.
    tiled = g.let("tiled", minimum(1, blocks * groups // (most + 1)))
    expects = g.let("logit_tasks", groups + tiled * (wide - groups))
    scored = g.events("scored", (blocks,), expects=expects)
    b, e = grid = g.grid(b=g.let("score_blocks", (1 - tiled) * blocks), e=groups)
    of_block, of_group = tile(b, block), tile(e, size)
    g.call(
        score_experts(routing),
        grid,
        reads=[x[of_block, :], router[of_group, :]],
        writes=[logits[of_block, of_group]],
        notifies=[scored[b]],
    )
    tiles = g.let("logit_tiles", tiled * ceildiv(blocks, TILE_BLOCKS))
    n, e = grid = g.grid(n=tiles, e=wide)
    of_tile, of_group = tile(n, TILE_BLOCKS * block), tile(e, TILE_EXPERTS)
    g.call(
        thin_float(routing.dtype),
        grid,
        name="score_tiles",
        reads=[x[of_tile, :], router[of_group, :]],
        writes=[logits[of_tile, of_group]],
        notifies=[scored[n]],
    )
    # Where tiles are whole, the blocks of each become ready together.
    whole = g.let("whole_tiles", tiled * (1 - minimum(1, blocks % TILE_BLOCKS)))
    together = g.let("tile_blocks", 1 + (TILE_BLOCKS - 1) * whole)
    n, i = grid = g.grid(n=g.let("chosen_tiles", blocks // together), i=together)
    this = n * together + i
    of_block = tile(this, block)
    g.call(
        choose_experts(routing),
        grid,
        reads=[logits[of_block, :]],
        writes=[*(t[of_block, :] for t in (ids, weights)), chosen[:, this]],
        waits=[scored[n - (tiled - whole) * (n - n // TILE_BLOCKS)]],
        notifies=[routed[this if each else 0]],
    )
    return Choices(ids, weights, chosen)


def add_tiles(
    g: Graph,
    routing: Routing,
    chosen: Tensor,
    choices: Expr,
    waits: Sequence[EventRef],
) -> Tiles:
    """Add the tiles of at most `choices` rows: chosen [experts, blocks] tells whose."""
    experts, blocks = routing.experts, chosen.shape[1]
    choices = g.let("choices", choices)
    # No routing needs more tiles than this; those that are too many stay empty.
    tiles = g.let("tiles", minimum(choices, experts + choices // routing.tile_rows))
    total = g.let("rows", choices + PADDING * tiles)
    before = g.local("before", chosen.shape, "int32")
    counts = g.local("counts", (experts,), "int32")
    expert_row = g.local("expert_row", (experts,), "int32")
    most = g.let("most_rows", blocks * routing.block)  # of an expert
    tokens = g.local("expert_tokens", (experts * most,), "int32")
    expert, row, rows, first = (
        g.local(f"tile_{name}", (tiles,), "int32")
        for name in ("expert", "row", "rows", "first")
    )
    listed = g.events("listed", (1,), expects=experts)
    planned = g.events("planned", (1,), expects=1)
    (e,) = grid = g.grid(e=experts)
    g.call(
        list_rows(routing),
        grid,
        reads=[chosen[e, :]],
        writes=[before[e, :], tokens[tile(e, most)], counts[e]],
        waits=waits,
        notifies=[listed[0]],
    )
    g.call(
        plan_tiles(routing),
        g.grid(one=1),
        reads=[counts[:], tokens[span(0, most)]],
        writes=[t[:] for t in (expert_row, expert, row, rows, first)],
        waits=[listed[0]],
        notifies=[planned[0]],
    )
    lists = expert, row, rows, first, before, expert_row, tokens
    return Tiles(*lists, total, routing.tile_rows, planned[0])


def add_products(
    g: Graph,
    routing: Routing,
    sizes: Sizes,
    x: Tensor,
    tiles: Tiles,
    gate_up: Tensor,
    down: Tensor,
    waits: Sequence[EventRef] = (),
) -> Product:
    """Add both products; the first one picks its rows from x, once `waits` are met
    too."""
    _, hidden, inner = down.shape
    many = 1 + x.shape[0] // MANY_TOKENS
    up_columns, tile_columns = (
        g.let(name, minimum(columns, -(-columns // 2) * many))
        for name, columns in (
            ("up_columns", sizes.up_columns),
            ("down_columns", sizes.tile_columns),
        )
    )
    wide = g.let("wide", ceildiv(inner, up_columns))
    columns = g.let("columns", ceildiv(hidden, tile_columns))
    per = g.let("per", ceildiv(columns, sizes.passes))
    passes = g.let("passes", ceildiv(columns, per))
    (count,), rows = tiles.expert.shape, tiles.total
    active = g.local("active", (rows, inner), routing.dtype)
    product = g.local("product", (rows, hidden), routing.dtype)
    activated = g.events("activated", (count,), expects=wide)
    produced = g.events("produced", (passes,), expects=count * per)

    r, j = grid = g.grid(r=count, j=wide)
    expert, row, size = tiles.of(r)
    # NOTE: what is not needed reads nothing. Where peers write x, a few rows a task,
    # this spares the proof to hold all tiles against all rows: loaded regions are left
    # out.
    seen = (
        x[:, :] if x.kind == "input" else x[span(0, x.shape[0] * minimum(size, 1)), :]
    )
    turns = partial(grouped_rows, blocks=count, columns=wide, group=TILES_TOGETHER)
    last = count * wide
    skipped = j * up_columns
    width = minimum(up_columns, inner - skipped)
    g.call(
        grouped_gated(routing.dtype),
        grid,
        name="gate_up_projection",
        reads=[
            seen,
            gate_up[expert, span(skipped, width), :],
            gate_up[expert, span(inner + skipped, width), :],
            tiles.tokens[span(tiles.first.load(r), size)],
        ],
        writes=[active[span(row, size), tile(j, up_columns)]],
        waits=[tiles.planned, *waits],
        notifies=[activated[r]],
        order=turns,
        empty_until=lambda t: _until(t, last, turns(t)[0] % TILES_TOGETHER),
    )
    s, r, j = grid = g.grid(s=passes, r=count, j=per)
    expert, row, size = tiles.of(r)
    of_column = tile(s * per + j, tile_columns)

    def until(t: Expr) -> Expr:
        this, task = t // (count * per), t % (count * per)
        return _until(t, (this + 1) * count * per, (this * per + task % per) // columns)

    g.call(
        grouped_store(routing.dtype),
        grid,
        name="down_projection",
        reads=[active[span(row, size), :], down[expert, of_column, :]],
        writes=[product[span(row, size), of_column]],
        waits=[activated[r]],
        notifies=[produced[s]],
        empty_until=until,
    )
    return Product(product, produced, passes, per * tile_columns)


def _until(t: Expr, end: Expr, alone: Expr) -> Expr:
    """Where the tasks from an empty task t on end that must be empty, too: as all tiles
    after an empty one are empty, at `end`; if `alone` is not 0, it tells of no other
    one."""
    return end - minimum(1, alone) * (end - t - 1)


def add_places(
    g: Graph,
    routing: Routing,
    choices: Choices,
    tiles: Tiles,
    tokens: Expr,
    lower: Sequence[Region] = (),
) -> tuple[Tensor, EventRef]:
    """Add where the rows of each token lie: place, of the shape of ids, and the event
    that is met once all are known. Of each rank whose choices these are, there are so
    many tokens."""
    chosen, ids, block = choices.chosen, choices.ids, routing.block
    blocks = chosen.shape[1]
    place = g.local("place", ids.shape, "int32")
    located = g.events("located", (1,), expects=blocks)
    (b,) = grid = g.grid(b=blocks)
    of_block = tile(b, block)
    if routing.split:
        left = tokens - b % ceildiv(tokens, block) * block
        of_block = span(b * block, minimum(block, left))
    g.call(
        locate_rows(routing),
        grid,
        reads=[
            ids[of_block, :],
            *(t[:, b] for t in (chosen, tiles.before)),
            tiles.expert_row[:],
            *lower,
        ],
        writes=[place[of_block, :]],
        waits=[tiles.planned],
        notifies=[located[0]],
    )
    return place, located[0]
