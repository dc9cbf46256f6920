"""The graph of a mixture of experts for so few tokens that it pays to do each alone.

For one token of qwen3-30b-a3b on an H200 it took 31.9 us in place of 53.8 (the records
of 97c7e54 and e2f1a17 in benchmarks/results/moe.jsonl).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from etc_dist.errors import ArgumentError
from etc_dist.functions.activation import Activation
from etc_dist.functions.choose_experts import choose_experts
from etc_dist.functions.down_token import down_token
from etc_dist.functions.gate_up_token import gate_up_token
from etc_dist.functions.routing import Mixture, Routing
from etc_dist.functions.scaled_weights import SCALINGS, ScaledTensor
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
from etc_dist.layers.moe_steps import (
    SCORE_TASKS,
    Weight,
    add_biases,
    add_inputs,
    add_logits,
    add_scores,
)
from etc_dist.layers.shared_expert import add_inputs_of_shared, shared_routing
from etc_dist.ops.multiply import Matrix

FEW_BYTES = 350_000_000
"""Bytes of weights that tokens alone read at most. With more, the bytes alone take the
time, and there matmuls that read an expert once for all its tokens are faster."""
PRODUCT_TASKS = 132
"""Tasks of a product that read weights concurrently, about one for each worker."""
PREFETCH_BYTES = 30_000_000
"""`gate_up_token` prefetches rows of down into L2 for one token that reads at most so
many bytes of them, and not for several tokens."""
FEW_TOKENS = 16
"""Tokens at most; fewer if they read more than FEW_BYTES of weights."""
SCORED = 8
"""Tokens, and experts, that one task scores at most. Half as many experts, unless these
are more than SCORE_TASKS tasks: a worker alone reads slowly."""


def most_tokens(top_k: int, hidden: int, inner: int, *, is_scaled: bool = False) -> int:
    """Tokens at most for which this graph is the better one. is_scaled: weights are of
    float8."""
    read = top_k * 3 * hidden * inner * (1 if is_scaled else 2)
    return min(FEW_TOKENS, FEW_BYTES // read)


@graph_function
def moe_few_tokens_graph(
    g: Graph,
    *,
    mixture: Mixture,
    dtype: str = "bfloat16",
    product_tasks: int = PRODUCT_TASKS,
    score_tasks: int = SCORE_TASKS,
    prefetch_bytes: int = PREFETCH_BYTES,
    w_layout: str = "nk",
) -> None:
    """x [tokens, hidden] -> y [tokens, hidden], as `moe_graph` on one rank.

    No rows are grouped by expert, and nothing is planned: a token's tasks read the rows
    of weights they need, two events after the first load. A task has some columns of
    each expert that its token picks; those of down come in pairs. If there is one token
    and L2 holds its rows of down, tasks of `gate_up_token` prefetch those of half of
    its experts, a share each. Tasks of `down_token` always prefetch their own rows
    before they wait.

    A shared expert is a mixture of one expert, whose weighted rows are added to those
    of the others. w_layout: as of `moe_graph`.

    Raises ArgumentError for biases of experts."""
    if mixture.has_biases:
        raise ArgumentError(
            "the program for few tokens has no biases of experts",
            where="moe_few_tokens_graph",
            wanted="a mixture without has_biases",
            got=str(mixture),
            fix="use moe_graph",
        )
    tokens, hidden, inner = g.dims("tokens hidden inner")
    routing, shared = mixture.routing(dtype), mixture.shared
    x, router, gate_up, down = add_inputs(
        g, routing, tokens, hidden, inner, w_layout=w_layout
    )
    biases = add_biases(g, routing)
    y = g.output("y", (tokens, hidden), dtype)
    tasks = g.let("token_tasks", maximum(1, product_tasks // tokens))
    logits, routed = _score(g, routing, x, router, score_tasks)
    columns = g.let("down_columns", 2 * ceildiv(hidden, 2 * tasks))
    # Divisions: a product of sizes might not fit 32 bits.
    rows_bytes = routing.top_k * (1 if w_layout in SCALINGS else 2)
    fits = minimum(1, prefetch_bytes // rows_bytes // hidden // inner)
    token_experts = _TokenExperts(
        g,
        routing,
        tokens,
        gate_up,
        down,
        tasks,
        columns,
        g.let("down_blocks", ceildiv(hidden, columns)),
        g.let("prefetches", fits * (1 // tokens)),
        mixture.activation,
        biases,
        w_layout=w_layout,
    )
    choices = token_experts.choose(logits, routed)
    if not shared:
        active = token_experts.activate(x, logits, routed)
        token_experts.add_up(choices, active, y)
        return
    routing_of_shared = shared_routing(routing, shared)
    _, gate_up, down, gate = add_inputs_of_shared(g, dtype, shared, hidden, w_layout)
    expert = replace(
        token_experts,
        routing=routing_of_shared,
        gate_up=gate_up,
        down=down,
        prefetches=0,
        biases=(),
        name="shared_",
    )
    rows = g.local("shared_rows", (tokens, hidden), dtype)
    of_shared = logits, routed  # without a gate, the weight is 1 for any logit
    if gate is not None:
        of_shared = _score(g, routing_of_shared, x, gate, score_tasks, "shared_")
    shared_chosen = expert.choose(*of_shared)
    shared_active = expert.activate(x, *of_shared)
    active = token_experts.activate(x, logits, routed, token_experts.blocks)
    expert.add_up(shared_chosen, shared_active, rows, end_events=active[1])
    token_experts.add_up(choices, active, y, addend=rows)


def _score(
    g: Graph,
    routing: Routing,
    x: Tensor,
    router: Tensor,
    score_tasks: int,
    name: str = "",
) -> tuple[Tensor, EventTensor]:
    """Add the logits of each token, and the events after which those of SCORED tokens
    can be read."""
    tokens, experts = x.shape[0], routing.experts
    logits = add_logits(g, routing, tokens, name)
    num_blocks = g.let(f"{name}blocks", ceildiv(tokens, SCORED))
    is_many = minimum(1, num_blocks * ceildiv(experts, 4) // (score_tasks + 1))
    scored = g.let(f"{name}scored", 4 + 4 * is_many)
    num_groups = g.let(f"{name}groups", ceildiv(experts, scored))
    routed = g.events(f"{name}routed", (num_blocks,), expects=num_groups)
    add_scores(
        g,
        replace(routing, block=SCORED),
        x,
        Matrix(router),
        logits,
        (num_blocks, num_groups, scored),
        lambda b: routed[b],
        f"{name}score_experts",
        most=SCORED,
    )
    return logits, routed


@dataclass(frozen=True)
class _TokenExperts:
    """Experts of which each of `tokens` tokens takes some, and the calls for them.

    gate_up: [experts, 2 inner, hidden]. down: [experts, hidden, inner]. tasks: of the
    activations of a token. columns, blocks: of a task of a token's sums, which come in
    pairs, and the number of these tasks. prefetches: 1 if `activate` prefetches rows of
    down, else 0. name: the prefix of names."""

    g: Graph
    routing: Routing
    tokens: Expr
    gate_up: Weight
    down: Weight
    tasks: Expr
    columns: Expr
    blocks: Expr
    prefetches: Expr | int
    activation: Activation
    biases: Sequence[Region] = ()
    name: str = ""
    w_layout: str = "nk"

    def choose(
        self, logits: Tensor, routed: EventTensor
    ) -> tuple[Tensor, Tensor, EventTensor]:
        """Add the choices of each token: ids, weights, and the events after which they
        can be read. routed: the events of the logits."""
        g, shape = self.g, (self.tokens, self.routing.top_k)
        ids = g.local(f"{self.name}ids", shape, "int32")
        weights = g.local(f"{self.name}weights", shape, "float32")
        picked = g.events(f"{self.name}picked", (self.tokens,), expects=1)
        (m,) = grid = g.grid(m=self.tokens)
        token = span(m, 1)
        g.call(
            choose_experts(self.routing, 1),
            grid,
            name=f"{self.name}choose_experts",
            reads=[logits[token, span(0, self.routing.experts)], *self.biases],
            writes=[ids[token, :], weights[token, :]],
            waits=[routed[m // SCORED]],
            notifies=[picked[m]],
        )
        return ids, weights, picked

    def activate(
        self, x: Tensor, logits: Tensor, routed: EventTensor, further: Expr | int = 0
    ) -> tuple[Tensor, EventTensor]:
        """Add the activations of each token, and the events after which they can be
        read. further: notifications of others."""
        g, routing = self.g, self.routing
        _, hidden, inner = self.down.shape
        shape = self.tokens, routing.top_k, inner
        active = g.local(f"{self.name}active", shape, routing.dtype)
        width = g.let(f"{self.name}up_columns", ceildiv(inner, self.tasks))
        num_blocks = g.let(f"{self.name}up_blocks", ceildiv(inner, width))
        activated = g.events(
            f"{self.name}activated", (self.tokens,), expects=num_blocks + further
        )
        m, j = grid = g.grid(m=self.tokens, j=num_blocks)
        token, first = span(m, 1), j * width
        num_columns = minimum(width, inner - first)
        share = ceildiv(hidden, num_blocks) * self.prefetches
        share = g.let(f"{self.name}prefetched_rows", share)
        gate_up, scales = _parts(self.gate_up)
        down, _ = _parts(self.down)
        g.call(
            gate_up_token(routing, self.activation, SCALINGS.get(self.w_layout)),
            grid,
            name=f"{self.name}gate_up_token",
            reads=[
                x[token, :],
                logits[token, span(0, routing.experts)],
                *(gate_up[:, span(n + first, num_columns), :] for n in (0, inner)),
                down[:, span(minimum(hidden, j * share), share), :],
                *scales,
                *self.biases,
            ],
            writes=[active[token, :, span(first, num_columns)]],
            waits=[routed[m // SCORED]],
            notifies=[activated[m]],
        )
        return active, activated

    def add_up(
        self,
        choices: tuple[Tensor, Tensor, EventTensor],
        active: tuple[Tensor, EventTensor],
        y: Tensor,
        *,
        addend: Tensor | None = None,
        end_events: EventTensor | None = None,
    ) -> None:
        """Add the weighted sums of each token to y. choices, active: as `choose` and
        `activate` give them. addend: rows that are added to the sums, which the events
        of `active` cover, too. end_events: the events that follow."""
        g, (ids, weights, picked), (rows, activated) = self.g, choices, active
        m, j = grid = g.grid(m=self.tokens, j=self.blocks)
        token, of_block = span(m, 1), tile(j, self.columns)
        down, scales = _parts(self.down)
        scaling = SCALINGS.get(self.w_layout)
        g.call(
            down_token(self.routing, adds=addend is not None, scaling=scaling),
            grid,
            name=f"{self.name}down_token",
            reads=[
                ids[token, :],
                weights[token, :],
                rows[token, :, :],
                down[:, of_block, :],
                *scales,
                *([] if addend is None else [addend[token, of_block]]),
            ],
            writes=[y[token, of_block]],
            waits=[picked[m], activated[m]],
            notifies=[] if end_events is None else [end_events[m]],
        )


def _parts(w: Weight) -> tuple[Tensor, list[Region]]:
    """The elements or codes of weights, and the region of their scales, if any."""
    if isinstance(w, ScaledTensor):
        return w.codes, [w.scales[:, :, :]]
    return w, []
