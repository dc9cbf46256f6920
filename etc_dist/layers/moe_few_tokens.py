"""The graph of a mixture of experts for so few tokens that it pays to do each alone.

For one token of qwen3-30b-a3b on an H200 it took 31.9 us in place of 53.8 (the records
of 97c7e54 and e2f1a17 in benchmarks/results/moe.jsonl).
"""

from __future__ import annotations

from etc_dist.functions.choose_experts import choose_experts
from etc_dist.functions.down_token import down_token
from etc_dist.functions.gate_up_token import gate_up_token
from etc_dist.functions.router import Router, as_router
from etc_dist.functions.routing import Routing
from etc_dist.functions.score_token import score_token
from etc_dist.ir import Graph, ceildiv, graph_function, maximum, minimum, span, tile
from etc_dist.layers.moe_steps import SCORE_TASKS, add_biases, add_inputs, add_logits

FEW_TOKENS = 16
"""Tokens at most,"""
FEW_BYTES = 350_000_000
"""and bytes of weights that they read. With more, the bytes alone take the time, and
there the other program, which reads an expert once for all tokens, is the faster."""
PRODUCT_TASKS = 132
"""Tasks of a product that read weights concurrently, about one for each worker."""
SCORED = 8
"""Experts that one task scores at most, one a warp, and fewer for no more than
SCORE_TASKS tasks: a worker alone reads slowly."""
PREFETCH_BYTES = 30_000_000
"""Rows of down are prefetched into L2 for one token that reads at most so many bytes of
them, and not for several tokens."""


def most_tokens(top_k: int, hidden: int, inner: int) -> int:
    """Tokens at most for which this graph is the better one."""
    read = top_k * 3 * hidden * inner * 2
    return min(FEW_TOKENS, FEW_BYTES // read)


@graph_function
def moe_few_tokens_graph(
    g: Graph,
    *,
    experts: int,
    top_k: int | Router,
    normalize: bool = True,
    dtype: str = "bfloat16",
    product_tasks: int = PRODUCT_TASKS,
    score_tasks: int = SCORE_TASKS,
    prefetch_bytes: int = PREFETCH_BYTES,
) -> None:
    """x [tokens, hidden] -> y [tokens, hidden], as `moe_graph` on one rank.

    No rows are grouped by expert, and nothing is planned: a token's tasks read the rows
    of weights they need, two events after the first load. A task has some columns of
    each expert that its token picks; those of down come in pairs. If there is one token
    and L2 holds its rows of down, tasks of `gate_up_token` prefetch those of half of
    its experts, a share each, and tasks of `down_token` their own rows of the
    others."""
    tokens, hidden, inner = g.dims("tokens hidden inner")
    routing = Routing(experts, as_router(top_k, normalize), dtype)
    top_k = routing.top_k
    x, router, gate_up, down = add_inputs(g, routing, tokens, hidden, inner)
    biases = add_biases(g, routing)
    y = g.output("y", (tokens, hidden), dtype)
    of_token = g.let("token_tasks", maximum(1, product_tasks // tokens))

    logits = add_logits(g, routing, tokens)
    scored = g.let(
        "scored", minimum(SCORED, maximum(2, ceildiv(experts * tokens, score_tasks)))
    )
    groups = g.let("groups", ceildiv(experts, scored))
    routed = g.events("routed", (tokens,), expects=groups)
    m, e = grid = g.grid(m=tokens, e=groups)
    token, of_group = span(m, 1), routing.group(e, scored)
    g.call(
        score_token(routing),
        grid,
        reads=[x[token, :], router[of_group, :]],
        writes=[logits[token, of_group]],
        notifies=[routed[m]],
    )

    ids = g.local("ids", (tokens, top_k), "int32")
    weights = g.local("weights", (tokens, top_k), "float32")
    picked = g.events("picked", (tokens,), expects=1)
    (m,) = grid = g.grid(m=tokens)
    token = span(m, 1)
    g.call(
        choose_experts(routing, 1),
        grid,
        reads=[logits[token, span(0, experts)], *biases],
        writes=[ids[token, :], weights[token, :]],
        waits=[routed[m]],
        notifies=[picked[m]],
    )

    active = g.local("active", (tokens, top_k, inner), dtype)
    width = g.let("up_columns", ceildiv(inner, of_token))
    blocks = g.let("up_blocks", ceildiv(inner, width))
    activated = g.events("activated", (tokens,), expects=blocks)
    m, j = grid = g.grid(m=tokens, j=blocks)
    token, first = span(m, 1), j * width
    left = minimum(width, inner - first)
    # Divisions: a product of sizes might not fit 32 bits.
    fits = minimum(1, prefetch_bytes // (2 * top_k) // hidden // inner)
    is_one = 1 // tokens
    prefetches = g.let("prefetches", fits * is_one)
    share = g.let("prefetched_rows", ceildiv(hidden, blocks) * prefetches)
    g.call(
        gate_up_token(routing),
        grid,
        reads=[
            x[token, :],
            logits[token, span(0, experts)],
            gate_up[:, span(first, left), :],
            gate_up[:, span(inner + first, left), :],
            down[:, span(minimum(hidden, j * share), share), :],
            *biases,
        ],
        writes=[active[token, :, span(first, left)]],
        waits=[routed[m]],
        notifies=[activated[m]],
    )

    width = g.let("down_columns", 2 * ceildiv(hidden, 2 * of_token))
    m, j = grid = g.grid(m=tokens, j=g.let("down_blocks", ceildiv(hidden, width)))
    token, of_block = span(m, 1), tile(j, width)
    g.call(
        down_token(routing),
        grid,
        reads=[
            ids[token, :],
            weights[token, :],
            active[token, :, :],
            down[:, of_block, :],
            down[
                :, span(j * width, minimum(width, hidden - j * width) * prefetches), :
            ],
        ],
        writes=[y[token, of_block]],
        waits=[picked[m], activated[m]],
    )
