"""The graph of a mixture of experts for so few tokens that it pays to do each alone.

For one token of qwen3-30b-a3b on an H200 it took 31.9 us in place of 53.8 (the records
of 97c7e54 and e2f1a17 in benchmarks/results/moe.jsonl).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from etc_dist.functions.activation import SWIGLU, Activation
from etc_dist.functions.choose_experts import choose_experts
from etc_dist.functions.down_token import down_token
from etc_dist.functions.gate_up_token import gate_up_token
from etc_dist.functions.router import Router, as_router
from etc_dist.functions.routing import Routing
from etc_dist.functions.score_token import score_token
from etc_dist.ir import (
    EventTensor,
    Expr,
    Graph,
    Region,
    Tensor,
    ceildiv,
    graph_function,
    maximum,
    minimum,
    span,
    tile,
)
from etc_dist.ir.tensor import Tile
from etc_dist.layers.moe_steps import SCORE_TASKS, add_biases, add_inputs, add_logits
from etc_dist.layers.shared_expert import add_inputs_of_shared, shared_routing

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


@dataclass(frozen=True)
class Experts:
    """Experts of which each token takes some, and the events after which its logits can
    be read. name: the prefix of the names of tensors and events."""

    routing: Routing
    gate_up: Tensor
    down: Tensor
    logits: Tensor
    routed: EventTensor
    activation: Activation
    biases: Sequence[Region] = ()
    name: str = ""

    def of(self, token: Tile) -> Region:
        """A token's logits."""
        return self.logits[token, span(0, self.routing.experts)]


@graph_function
def moe_few_tokens_graph(
    g: Graph,
    *,
    experts: int,
    top_k: int | Router,
    normalize: bool | None = None,
    dtype: str = "bfloat16",
    product_tasks: int = PRODUCT_TASKS,
    score_tasks: int = SCORE_TASKS,
    prefetch_bytes: int = PREFETCH_BYTES,
    shared: str = "",
    activation: Activation = SWIGLU,
) -> None:
    """x [tokens, hidden] -> y [tokens, hidden], as `moe_graph` on one rank.

    No rows are grouped by expert, and nothing is planned: a token's tasks read the rows
    of weights they need, two events after the first load. A task has some columns of
    each expert that its token picks; those of down come in pairs. If there is one token
    and L2 holds its rows of down, tasks of `gate_up_token` prefetch those of half of
    its experts, a share each, and tasks of `down_token` their own rows of the others.

    shared, activation: as of `moe_graph`. A shared expert is a mixture of one expert,
    whose weighted rows are added to those of the others."""
    tokens, hidden, inner = g.dims("tokens hidden inner")
    routing = Routing(experts, as_router(top_k, normalize), dtype)
    x, router, gate_up, down = add_inputs(g, routing, tokens, hidden, inner)
    biases = add_biases(g, routing)
    y = g.output("y", (tokens, hidden), dtype)
    of_token = g.let("token_tasks", maximum(1, product_tasks // tokens))
    logits, routed = _score(g, routing, x, router, score_tasks)
    experts_of_all = Experts(
        *(routing, gate_up, down, logits, routed, activation), biases
    )
    chosen = _choose(g, experts_of_all, tokens)
    # Divisions: a product of sizes might not fit 32 bits.
    fits = minimum(1, prefetch_bytes // (2 * routing.top_k) // hidden // inner)
    prefetches = g.let("prefetches", fits * (1 // tokens))
    width = g.let("down_columns", 2 * ceildiv(hidden, 2 * of_token))
    columns = g.let("down_blocks", ceildiv(hidden, width)), width
    if not shared:
        active = _activate(g, experts_of_all, x, of_token, prefetches)
        _add_up(g, experts_of_all, chosen, *active, columns, prefetches, y)
        return
    shared_expert = _shared_expert(g, experts_of_all, x, shared, score_tasks)
    rows = g.local("shared_rows", (tokens, hidden), dtype)
    shared_chosen = _choose(g, shared_expert, tokens)
    shared_active = _activate(g, shared_expert, x, of_token, 0)
    active = _activate(g, experts_of_all, x, of_token, prefetches, columns[0])
    _add_up(
        g,
        shared_expert,
        shared_chosen,
        *shared_active,
        columns,
        0,
        rows,
        done=active[1],
    )
    _add_up(g, experts_of_all, chosen, *active, columns, prefetches, y, added=rows)


def _shared_expert(
    g: Graph, others: Experts, x: Tensor, kind: str, score_tasks: int
) -> Experts:
    """The shared expert, as a mixture of one."""
    routing = shared_routing(others.routing, kind)
    _, gate_up, down, gate = add_inputs_of_shared(g, routing.dtype, kind, x.shape[1])
    # NOTE: without a gate, the weight is 1 for any logit, here that of expert 0.
    logits, routed = others.logits, others.routed
    if gate is not None:
        logits, routed = _score(g, routing, x, gate, score_tasks, "shared_")
    own = routing, gate_up, down, logits, routed, others.activation
    return Experts(*own, name="shared_")


def _score(
    g: Graph,
    routing: Routing,
    x: Tensor,
    router: Tensor,
    score_tasks: int,
    name: str = "",
) -> tuple[Tensor, EventTensor]:
    """Add the logits of each token, and the events after which they can be read."""
    tokens, experts = x.shape[0], routing.experts
    logits = add_logits(g, routing, tokens, name)
    most = minimum(SCORED, maximum(2, ceildiv(experts * tokens, score_tasks)))
    scored = g.let(f"{name}scored", most)
    groups = g.let(f"{name}groups", ceildiv(experts, scored))
    routed = g.events(f"{name}routed", (tokens,), expects=groups)
    m, e = grid = g.grid(m=tokens, e=groups)
    token, of_group = span(m, 1), routing.group(e, scored)
    g.call(
        score_token(routing),
        grid,
        name=f"{name}score_token",
        reads=[x[token, :], router[of_group, :]],
        writes=[logits[token, of_group]],
        notifies=[routed[m]],
    )
    return logits, routed


def _choose(g: Graph, e: Experts, tokens: Expr) -> tuple[Tensor, Tensor, EventTensor]:
    """Add the choices of each token: ids, weights, and the events after which they can
    be read."""
    shape = tokens, e.routing.top_k
    ids = g.local(f"{e.name}ids", shape, "int32")
    weights = g.local(f"{e.name}weights", shape, "float32")
    picked = g.events(f"{e.name}picked", (tokens,), expects=1)
    (m,) = grid = g.grid(m=tokens)
    token = span(m, 1)
    g.call(
        choose_experts(e.routing, 1),
        grid,
        name=f"{e.name}choose_experts",
        reads=[e.of(token), *e.biases],
        writes=[ids[token, :], weights[token, :]],
        waits=[e.routed[m]],
        notifies=[picked[m]],
    )
    return ids, weights, picked


def _activate(
    g: Graph,
    e: Experts,
    x: Tensor,
    of_token: Expr,
    prefetches: Expr | int,
    further: Expr | int = 0,
) -> tuple[Tensor, EventTensor]:
    """Add the activations of each token, and the events after which they can be read.
    prefetches: 1 if rows of down are prefetched. further: notifications of others."""
    (tokens, hidden), inner = x.shape, e.down.shape[2]
    active = g.local(
        f"{e.name}active", (tokens, e.routing.top_k, inner), e.routing.dtype
    )
    width = g.let(f"{e.name}up_columns", ceildiv(inner, of_token))
    blocks = g.let(f"{e.name}up_blocks", ceildiv(inner, width))
    activated = g.events(f"{e.name}activated", (tokens,), expects=blocks + further)
    m, j = grid = g.grid(m=tokens, j=blocks)
    token, first = span(m, 1), j * width
    left = minimum(width, inner - first)
    share = g.let(f"{e.name}prefetched_rows", ceildiv(hidden, blocks) * prefetches)
    g.call(
        gate_up_token(e.routing, e.activation),
        grid,
        name=f"{e.name}gate_up_token",
        reads=[
            x[token, :],
            e.of(token),
            e.gate_up[:, span(first, left), :],
            e.gate_up[:, span(inner + first, left), :],
            e.down[:, span(minimum(hidden, j * share), share), :],
            *e.biases,
        ],
        writes=[active[token, :, span(first, left)]],
        waits=[e.routed[m]],
        notifies=[activated[m]],
    )
    return active, activated


def _add_up(
    g: Graph,
    e: Experts,
    chosen: tuple[Tensor, Tensor, EventTensor],
    active: Tensor,
    activated: EventTensor,
    columns: tuple[Expr, Expr],
    prefetches: Expr | int,
    y: Tensor,
    *,
    added: Tensor | None = None,
    done: EventTensor | None = None,
) -> None:
    """Add the weighted sums of each token. columns: the number of tasks, and of the
    columns of each. added: rows that are added to the sums, which `activated` covers,
    too. done: the events that follow."""
    (tokens, hidden), (ids, weights, picked) = y.shape, chosen
    blocks, width = columns
    m, j = grid = g.grid(m=tokens, j=blocks)
    token, of_block = span(m, 1), tile(j, width)
    left = minimum(width, hidden - j * width)
    g.call(
        down_token(e.routing, adds=added is not None),
        grid,
        name=f"{e.name}down_token",
        reads=[
            ids[token, :],
            weights[token, :],
            active[token, :, :],
            e.down[:, of_block, :],
            e.down[:, span(j * width, left * prefetches), :],
            *([] if added is None else [added[token, of_block]]),
        ],
        writes=[y[token, of_block]],
        waits=[picked[m], activated[m]],
        notifies=[] if done is None else [done[m]],
    )
