"""The graph of a mixture of experts for so few tokens that it pays to do each alone.

For one token of qwen3-30b-a3b on an H200 it took 31.9 us in place of 53.8 (the records
of 97c7e54 and e2f1a17 in benchmarks/results/moe.jsonl).
"""

from __future__ import annotations

from dataclasses import replace

from etc_dist.functions.activation import SWIGLU, Activation
from etc_dist.functions.choose_experts import choose_experts
from etc_dist.functions.router import Router, as_router
from etc_dist.functions.routing import Routing
from etc_dist.functions.score_token import score_token
from etc_dist.ir import (
    EventTensor,
    Graph,
    Tensor,
    ceildiv,
    graph_function,
    maximum,
    minimum,
    span,
)
from etc_dist.layers.moe_steps import SCORE_TASKS, add_biases, add_inputs, add_logits
from etc_dist.layers.moe_tokens import (
    FEW_BYTES,
    PREFETCH_BYTES,
    PRODUCT_TASKS,
    TokenExperts,
    bytes_fit,
    sums_of,
)
from etc_dist.layers.shared_expert import add_inputs_of_shared, shared_routing

FEW_TOKENS = 16
"""Tokens at most; fewer if they read more than FEW_BYTES of weights."""
SCORED = 8
"""Experts that one task scores at most, one a warp, and fewer for no more than
SCORE_TASKS tasks: a worker alone reads slowly."""


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
    its experts, a share each. Tasks of `down_token` always prefetch their own rows
    before they wait.

    shared, activation: as of `moe_graph`. A shared expert is a mixture of one expert,
    whose weighted rows are added to those of the others."""
    tokens, hidden, inner = g.dims("tokens hidden inner")
    routing = Routing(experts, as_router(top_k, normalize), dtype)
    x, router, gate_up, down = add_inputs(g, routing, tokens, hidden, inner)
    biases = add_biases(g, routing)
    y = g.output("y", (tokens, hidden), dtype)
    tasks = g.let("token_tasks", maximum(1, product_tasks // tokens))
    logits, routed = _score(g, routing, x, router, score_tasks)
    fits = bytes_fit(prefetch_bytes, routing.top_k, hidden, inner, 1)
    others = TokenExperts(
        g,
        routing,
        tokens,
        (gate_up,),
        down,
        tasks,
        sums_of(g, hidden, tasks),
        g.let("prefetches", fits * (1 // tokens)),
        activation,
        biases,
    )
    chosen = _choose(others, logits, routed)
    if not shared:
        active = others.activate(x, logits, lambda m: [routed[m]])
        _add_up(others, chosen, active, y)
        return
    own = shared_routing(routing, shared)
    _, gate_up, down, gate = add_inputs_of_shared(g, dtype, shared, hidden)
    expert = replace(
        others,
        routing=own,
        gate_up=(gate_up,),
        down=down,
        prefetches=0,
        biases=(),
        name="shared_",
    )
    rows = g.local("shared_rows", (tokens, hidden), dtype)
    of_shared = logits, routed  # without a gate, the weight is 1 for any logit
    if gate is not None:
        of_shared = _score(g, own, x, gate, score_tasks, "shared_")
    logits_of_shared, scored = of_shared
    shared_chosen = _choose(expert, *of_shared)
    shared_active = expert.activate(x, logits_of_shared, lambda m: [scored[m]])
    active = others.activate(x, logits, lambda m: [routed[m]], others.sums[0])
    _add_up(expert, shared_chosen, shared_active, rows, done=active[1])
    _add_up(others, chosen, active, y, added=rows)


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


def _choose(
    e: TokenExperts, logits: Tensor, routed: EventTensor
) -> tuple[Tensor, Tensor, EventTensor]:
    """Add the choices of each token: ids, weights, and the events after which they can
    be read."""
    g, shape = e.g, (e.tokens, e.routing.top_k)
    ids = g.local(f"{e.name}ids", shape, "int32")
    weights = g.local(f"{e.name}weights", shape, "float32")
    picked = g.events(f"{e.name}picked", (e.tokens,), expects=1)
    (m,) = grid = g.grid(m=e.tokens)
    token = span(m, 1)
    g.call(
        choose_experts(e.routing, 1),
        grid,
        name=f"{e.name}choose_experts",
        reads=[logits[token, span(0, e.routing.experts)], *e.biases],
        writes=[ids[token, :], weights[token, :]],
        waits=[routed[m]],
        notifies=[picked[m]],
    )
    return ids, weights, picked


def _add_up(
    e: TokenExperts,
    chosen: tuple[Tensor, Tensor, EventTensor],
    active: tuple[Tensor, EventTensor],
    y: Tensor,
    *,
    added: Tensor | None = None,
    done: EventTensor | None = None,
) -> None:
    """Add the weighted sums of each token to y. added: as of `TokenExperts.add_up`.
    done: the events that follow."""
    ids, weights, picked = chosen
    e.add_up(
        lambda token: [ids[token, :], weights[token, :]],
        active,
        lambda m: [picked[m]],
        lambda token, columns: [y[token, columns]],
        lambda m: [] if done is None else [done[m]],
        added,
    )
