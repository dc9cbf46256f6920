"""The graph of a mixture of experts, on one rank or on several."""

from __future__ import annotations

from dataclasses import replace

from etc_dist.errors import expect_choice
from etc_dist.functions.expect_in_range import expect_in_range
from etc_dist.functions.mark_experts import mark_experts
from etc_dist.functions.router import Router
from etc_dist.functions.routing import Mixture, Routing
from etc_dist.functions.scaled_weights import ScaledTensor, weight_input
from etc_dist.functions.wide_tile import WIDE, shapes_of_rows
from etc_dist.ir import (
    EventRef,
    EventTensor,
    Expr,
    Graph,
    Tensor,
    ceildiv,
    graph_function,
    maximum,
    minimum,
    span,
    tile,
)
from etc_dist.layers.moe_exchange import (
    AllTokens,
    Sent,
    exchange,
    send_back,
)
from etc_dist.layers.moe_steps import (
    Choices,
    Sizes,
    Weight,
    add_choices,
    add_inputs,
    add_places,
    add_projections,
    add_tiles,
)
from etc_dist.layers.shared_expert import ExpertRows, SharedRows, add_shared

PARALLEL = ("tensor", "expert")
PARALLEL_PASSES = 4
"""Passes on several ranks, where sums are sent, so that the tail is longer."""
OF_PARTS = Sizes(tile_columns=WIDE.columns // 2, passes=8)
"""Sizes where wide experts are divided among ranks: a rank has few tasks of the down
projection, each of which takes long. With smaller ones the last round of the rank with
most rows is shorter."""
COMBINE_TASKS = 1584
"""The number of tasks of a pass up to which a group's columns are divided: one for each
of a worker's twelve warps."""


@graph_function
def moe_graph(
    g: Graph,
    *,
    mixture: Mixture,
    dtype: str = "bfloat16",
    parallel: str = "tensor",
    sizes: Sizes | None = None,
    in_order: bool = False,
    packs: bool = False,
    has_count: bool = False,
    w_layout: str = "nk",
) -> None:
    """x [tokens, hidden] -> y [tokens, hidden], both and all weights of `dtype`, or
    those of experts, also of a shared one, in float8 with scales: one of SCALINGS as
    `w_layout`.

    router [experts, hidden]; gate_up [experts, 2 inner, hidden], gate's rows first;
    down [experts, hidden, inner]. The router selects each token's experts. Each
    expert's tokens are divided into tiles, whose number, place and size are computed at
    run time. The rows of x of a tile's tokens are multiplied by the expert's gate and
    up into activations, and these by down. Each token's rows are combined.

    On several ranks, parallel = "tensor": all ranks have the same x and router, and a
    shard of every expert's inner width; y [shard, hidden] are this rank's tokens out of
    world * shard. parallel = "expert": each rank has different tokens, the whole router
    and a shard of the experts.

    packs: rows of x are first copied to their tiles, for experts that are wide. A
    shared expert: shared_gate_up [2 shared_inner, hidden], shared_down [hidden,
    shared_inner], and shared_gate [hidden], of which the sigmoid of x @ shared_gate is
    the weight. parallel="tensor": a shard of its inner width. Biases: gate_up_bias
    [experts, 2 inner] and down_bias [experts, hidden]; of several ranks that have a
    part of the inner width, each adds its down_bias. has_count: with parallel="expert"
    on several ranks, only the first of a rank's rows are tokens, as many as its input
    count [1] says; other rows of y have no meaning.

    sizes: those of tiles, and the numbers of tasks. in_order: as of `Sizes`."""
    if sizes is None:
        is_wide = packs and parallel == "expert"
        of_ranks = OF_PARTS if is_wide else Sizes(passes=PARALLEL_PASSES)
        sizes = of_ranks if g.world_size > 1 else Sizes()
    sizes = replace(
        sizes,
        mixture=mixture,
        in_order=in_order,
        packs=packs,
        has_count=has_count and parallel == "expert" and g.world_size > 1,
    )
    sizes = _with_layout(sizes, w_layout)
    routing = mixture.routing(dtype, sizes.block, sizes.tile_rows)
    if g.world_size == 1:
        _one_rank(g, routing, sizes)
    elif parallel == "tensor":
        _tensor_parallel(g, routing, sizes)
    else:
        expect_choice(parallel, PARALLEL, "parallel")
        _expert_parallel(g, routing, sizes)


def _with_layout(sizes: Sizes, w_layout: str) -> Sizes:
    """The sizes for weights of a layout."""
    if w_layout == "nk":
        return sizes
    most = max(shape.rows for shape in shapes_of_rows(w_layout))
    tile_rows = min(sizes.tile_rows, most)
    return replace(sizes, w_layout=w_layout, tile_rows=tile_rows)


@graph_function
def chosen_experts_graph(
    g: Graph,
    *,
    experts: int,
    top_k: int,
    dtype: str = "bfloat16",
    sizes: Sizes | None = None,
    packs: bool = False,
    w_layout: str = "nk",
) -> None:
    """`moe_graph` on one rank for tokens whose experts are chosen already: ids in int32
    and weights in fp32, both [tokens, top_k]. The ids of a token are all different,
    except for NONE, which stands for no expert. Any other id ends the run with an
    error. A token has the same bits for any number of tokens."""
    mixture = Mixture(experts, Router(top_k))
    sizes = replace(sizes or Sizes(), mixture=mixture, packs=packs, in_order=True)
    sizes = _with_layout(sizes, w_layout)
    block = sizes.block
    routing = replace(mixture.routing(dtype, block, sizes.tile_rows), has_none=True)
    tokens, hidden, inner = g.dims("tokens hidden inner")
    num_blocks = g.let("blocks", ceildiv(tokens, block))
    x = g.input("x", (tokens, hidden), dtype)
    choices = Choices(
        g.input("ids", (tokens, top_k), "int32"),
        g.input("weights", (tokens, top_k), "float32"),
        g.local("chosen", (experts, num_blocks), "int32"),
    )
    shapes = {"gate_up": (2 * inner, hidden), "down": (hidden, inner)}
    gate_up, down = (
        weight_input(g, name, w_layout, *shape, dtype, (experts,))
        for name, shape in shapes.items()
    )
    y = g.output("y", (tokens, hidden), dtype)
    marked = g.events("marked", (1,), expects=num_blocks)
    wrong = g.local("wrong", (num_blocks,), "int32")
    (b,) = grid = g.grid(b=num_blocks)
    g.call(
        mark_experts(routing),
        grid,
        reads=[choices.ids[tile(b, block), :]],
        writes=[choices.token_bits[:, b], wrong[span(b, 1)]],
        notifies=[marked[0]],
    )
    codes = gate_up.codes if isinstance(gate_up, ScaledTensor) else gate_up
    (b,) = grid = g.grid(b=num_blocks)
    g.call(
        expect_in_range(),
        grid,
        name="expert_exists",
        reads=[codes[wrong.load(b), 0, 0]],
        waits=[marked[0]],
    )
    rows = _multiply(g, routing, sizes, x, choices, marked[0], (gate_up, down))
    _combine(g, routing, sizes, rows, y)


def _multiply(
    g: Graph,
    routing: Routing,
    sizes: Sizes,
    x: Tensor,
    choices: Choices,
    routed: EventRef,
    weights: tuple[Weight, Weight],
) -> ExpertRows:
    """Add the tiles of the experts of this rank's tokens x, and their products by gate
    and up, and by down."""
    tokens = x.shape[0]
    tiles = add_tiles(g, routing, choices.token_bits, tokens * routing.top_k, [routed])
    of_shared = add_shared(g, routing, sizes, x)
    outputs = add_projections(g, routing, sizes, x, tiles, *weights)
    before = outputs.before
    place, located = add_places(g, routing, choices, tiles, tokens, waits=before)
    return ExpertRows(outputs, place, located, choices.weights, of_shared)


def _route(
    g: Graph, routing: Routing, sizes: Sizes, tokens: Expr, num_own: Expr
) -> tuple[ExpertRows, Tensor]:
    """Add the choices of all tokens, the products of their experts, and the result y
    [num_own, hidden]."""
    hidden, inner = g.dims("hidden inner")
    num_blocks = g.let("blocks", ceildiv(tokens, routing.block))
    x, router, gate_up, down = add_inputs(
        g, routing, tokens, hidden, inner, w_layout=sizes.w_layout
    )
    y = g.output("y", (num_own, hidden), routing.dtype)
    routed = g.events("routed", (1,), expects=num_blocks)
    choices = add_choices(g, routing, x, router, num_blocks, routed, sizes)
    return _multiply(g, routing, sizes, x, choices, routed[0], (gate_up, down)), y


def _one_rank(g: Graph, routing: Routing, sizes: Sizes) -> None:
    tokens = g.dims("tokens")
    rows, y = _route(g, routing, sizes, tokens, tokens)
    _combine(g, routing, sizes, rows, y)


def _combine(
    g: Graph, routing: Routing, sizes: Sizes, rows: ExpertRows, y: Tensor
) -> None:
    """Add the combination of each token's rows into y, on one rank."""
    tokens, outputs, size = y.shape[0], rows.outputs, sizes.group_tokens
    num_groups = g.let("groups", ceildiv(tokens, size))
    width = g.let("pass_columns", outputs.pass_columns)
    num_parts = maximum(1, COMBINE_TASKS // maximum(1, num_groups))
    part = g.let(
        "part", sizes.combined * ceildiv(ceildiv(width, sizes.combined), num_parts)
    )
    num_parts = g.let("parts", ceildiv(width, part))
    s, q, c = grid = g.grid(s=outputs.passes, q=num_groups, c=num_parts)
    start = c * part
    of_group = tile(q, size)
    of_part = span(s * width + start, minimum(part, width - start))
    rows.combine(g, routing, grid, s, of_group, of_part, y[of_group, of_part])


def _tensor_parallel(g: Graph, routing: Routing, sizes: Sizes) -> None:
    """Every rank routes all tokens and multiplies them by its shard of all experts.
    Each token's partial sum goes to the rank that owns it, which adds the ranks'."""
    shard = g.dims("shard")
    tokens = g.let("tokens", g.world_size * shard)
    rows, y = _route(g, routing, sizes, tokens, shard)
    send_back(g, routing, sizes, Sent(rows, tokens, lambda owner: owner * shard), y)


def _expert_parallel(g: Graph, routing: Routing, sizes: Sizes) -> None:
    """Every rank routes its own tokens and sends each to the ranks that have experts of
    its choice. These compute their experts' outputs, and send each token's partial sum
    back to its rank, which adds the ranks'.

    A rank has `own_tokens`, and exchanged tensors have room for the `tokens` of the one
    with the most: the choices of the others' further rows are NONE.

    In exchanged tensors, slot p of a rank belongs to rank + p: its own is the first."""
    own_tokens, tokens = g.own_rows("own_tokens", "tokens")
    hidden, inner = g.dims("hidden inner")
    world = g.world_size
    num_blocks = g.let("blocks", ceildiv(tokens, routing.block))
    padded = g.let("padded", num_blocks * routing.block)
    own_routing = replace(routing, experts=routing.experts // world, split=True)
    x, router, gate_up, down = add_inputs(
        g, routing, own_tokens, hidden, inner, own_routing.experts, sizes.w_layout
    )
    y = g.output("y", (own_tokens, hidden), routing.dtype)

    routed = g.events("routed", (num_blocks,), expects=1)
    choices = add_choices(g, routing, x, router, num_blocks, routed, sizes)
    to = _all_tokens(g, own_routing, sizes, x, choices, routed, tokens, padded)
    exchange(g, to)

    rows = world * tokens * min(routing.top_k, own_routing.experts)
    tiles = add_tiles(g, own_routing, to.all_choices.token_bits, rows, [to.shared[0]])
    of_shared = add_shared(g, own_routing, sizes, x)
    came = [to.arrival_events[0]]
    outputs = add_projections(
        g, own_routing, sizes, to.all_x, tiles, gate_up, down, came
    )
    lower = choices.token_bits[span(0, g.rank * own_routing.experts), 0]
    place, located = add_places(
        g, own_routing, to.all_choices, tiles, tokens, [lower], outputs.before
    )
    outgoing = Sent(
        ExpertRows(outputs, place, located, to.all_choices.weights, SharedRows()),
        world * tokens,
        lambda owner: to.slot(g, owner, g.rank) * padded,
        to,
        of_shared,
    )
    send_back(g, own_routing, sizes, outgoing, y)


def _all_tokens(
    g: Graph,
    routing: Routing,
    sizes: Sizes,
    x: Tensor,
    choices: Choices,
    routed: EventTensor,
    tokens: Expr,
    padded: Expr,
) -> AllTokens:
    """The memory and the events of the tokens of all ranks, for experts of `routing`.
    padded: `tokens` in whole blocks."""
    rows, num_blocks = g.world_size * padded, g.world_size * routed.shape[0]
    all_choices = Choices(
        g.symmetric("all_ids", (rows, routing.top_k), "int32"),
        g.symmetric("all_weights", (rows, routing.top_k), "float32"),
        g.symmetric("all_chosen", (routing.experts, num_blocks), "int32"),
    )
    all_x = g.symmetric("all_x", (rows, x.shape[1]), routing.dtype)
    exchanged = g.events("shared", (1,), expects=num_blocks, cross_rank=True)
    most = minimum(routing.block, tokens)
    share = maximum(1, ceildiv(g.world_size * tokens, sizes.push_tasks))
    num_pushes = g.let("pushes", ceildiv(most, share))
    return AllTokens(
        routing,
        tokens,
        blocks=routed.shape[0],
        padded=padded,
        x=x,
        choices=choices,
        routed=routed,
        all_x=all_x,
        all_choices=all_choices,
        shared=exchanged,
        pushes=num_pushes,
        size=g.let("push", ceildiv(most, maximum(1, num_pushes))),
        arrival_events=g.events(
            "arrived", (1,), expects=num_blocks * num_pushes, cross_rank=True
        ),
    )
