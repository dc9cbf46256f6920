"""The exchange of a mixture of experts between ranks: a token goes once to each rank of
its host that has experts of its choice, and once to each other host, and one sum comes
back from each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from etc_dist.functions.push_far import push_far
from etc_dist.functions.push_rows import push_rows
from etc_dist.functions.push_tokens import push_tokens
from etc_dist.functions.routing import Routing
from etc_dist.functions.share_choices import share_choices
from etc_dist.functions.sum_ranks import sum_expert_ranks, sum_ranks
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
    span,
    tile,
)
from etc_dist.ir.call import Grid
from etc_dist.ir.order import Order
from etc_dist.ir.tensor import Tile
from etc_dist.layers.moe_steps import Choices, Sizes
from etc_dist.layers.shared_expert import ExpertRows, SharedRows
from etc_dist.ops.host_sums import host_after
from etc_dist.ops.near_ranks import near_rank
from etc_dist.ops.tile_order import last_between

NO_ROWS = SharedRows()
PART_TASKS = 512
"""A task that sends sums has fewer tokens than `Sizes.part_tokens` to make about this
many tasks."""


@dataclass(frozen=True)
class AllTokens:
    """The tokens of all ranks on each rank, as an expert-parallel mixture needs them.

    A rank has up to `tokens`, `padded` to whole blocks; x, choices: its own. all_x,
    all_choices: those of all ranks; slot p of a rank belongs to rank + p. shared,
    arrival_events: the events of choices and of tokens. A block of tokens is pushed in
    `pushes` parts of `size`."""

    routing: Routing
    tokens: Expr
    blocks: Expr
    padded: Expr
    x: Tensor
    choices: Choices
    routed: EventTensor
    all_x: Tensor
    all_choices: Choices
    shared: EventTensor
    arrival_events: EventTensor
    pushes: Expr
    size: Expr

    def rows(self, b: Expr, first: Expr | int = 0) -> Tile:
        """The tokens of block b, from `first` on."""
        block = self.routing.block
        return span(first + b * block, minimum(block, self.tokens - b * block))

    def part(self, b: Expr, i: Expr, first: Expr | int = 0) -> Tile:
        """Part i of the tokens of block b, from `first` on."""
        block, start = self.routing.block, i * self.size
        num_tokens = minimum(
            minimum(self.size, block - start), self.tokens - b * block - start
        )
        return span(first + b * block + start, num_tokens)

    def slot(self, g: Graph, owner: Expr, at: Expr) -> Expr:
        """The slot of a rank's tokens on the rank `at`."""
        return (owner + g.world_size - at) % g.world_size

    def lower(self, rank: Expr | int, b: Expr | int = 0) -> Region:
        """A region of block b whose length is the number of experts of the ranks
        before."""
        return self.choices.token_bits[span(0, rank * self.routing.experts), b]


def exchange(g: Graph, to: AllTokens) -> None:
    """Add the exchange of tokens and choices. A rank sends all its tokens to its
    partner on each other host, which passes each on to the near ranks that have experts
    of its choice.

    NOTE: so messages do not depend on data. With many choices nearly every token needs
    every host."""
    world, near, experts = g.world_size, g.local_size, to.routing.experts
    choices = to.choices
    from_hosts = _send_to_hosts(g, to) if near < world else None
    # The peer that needs a slot first gets it first; this rank's own is the last.
    p, b = grid = g.grid(p=near, b=to.blocks)
    at = near_rank(g, (g.rank + (near - 1) - p) % near)
    words = choices.token_bits[span(at * experts, experts), b]
    rows = to.rows(b)
    lists = words, choices.ids[rows, :], choices.weights[rows, :]
    _share(g, to, "share_choices", grid, lists, (g.rank, at, b), [to.routed[b]])

    def in_turn(t: Expr) -> tuple[Expr, Expr, Expr]:
        # Local copies use no link, so they run between the others.
        p, task = last_between(t, near, to.blocks * to.pushes)
        return p, task // to.pushes, task % to.pushes

    p, b, i = grid = g.grid(p=near, b=to.blocks, i=to.pushes)
    at = near_rank(g, (g.rank + (near - 1) - p) % near)
    part = to.part(b, i)
    tokens = to.x[part, :], choices.ids[part, :]
    place = g.rank, at, b, i
    order = in_turn if near > 1 else None
    _push(g, to, "push_tokens", grid, tokens, place, [to.routed[b]], order)
    if from_hosts is not None:
        _pass_on(g, to, *from_hosts)


def _pass_on(
    g: Graph,
    to: AllTokens,
    came_x: Tensor,
    came: Choices,
    choice_events: EventTensor,
    here: EventTensor,
) -> None:
    """Pass on the tokens and choices of the partners to the near ranks."""
    world, near, experts = g.world_size, g.local_size, to.routing.experts
    local = g.rank % near
    s, b, p = grid = g.grid(s=world // near - 1, b=to.blocks, p=near)
    source = (g.rank + world - (s + 1) * near) % world
    target = (local + p) % near
    at = near_rank(g, target)
    words = came.token_bits[
        span(((s * to.blocks + b) * near + target) * experts, experts), 0
    ]
    rows = to.rows(b, s * to.padded)
    lists = words, came.ids[rows, :], came.weights[rows, :]
    _share(
        g, to, "pass_on_choices", grid, lists, (source, at, b), [choice_events[s, b]]
    )
    s, b, p, i = grid = g.grid(s=world // near - 1, b=to.blocks, p=near, i=to.pushes)
    part = to.part(b, i, s * to.padded)
    tokens = came_x[part, :], came.ids[part, :]
    waits = [to.routed[b], choice_events[s, b], here[s, b]]
    _push(g, to, "pass_on_tokens", grid, tokens, (source, at, b, i), waits)


def _send_to_hosts(
    g: Graph, to: AllTokens
) -> tuple[Tensor, Choices, EventTensor, EventTensor]:
    """Send all tokens and choices to the partners. Returns those of the partners, and
    the events of each block of choices and of tokens."""
    world, near, routing = g.world_size, g.local_size, to.routing
    steps, blocks, padded = world // near - 1, to.blocks, to.padded
    experts, words = routing.experts * world, routing.experts * near
    # Transfers between hosts read symmetric memory.
    sent_choices = _choices(g, "sent", to, padded, blocks * experts)
    came = _choices(g, "came", to, steps * padded, steps * blocks * words)
    shape, dtype = to.x.shape[1:], to.x.dtype
    sent_x = g.symmetric("sent_x", (padded, *shape), dtype)
    came_x = g.symmetric("came_x", (steps * padded, *shape), dtype)
    staged = g.events("staged_choices", (blocks,), expects=1)
    staged_x = g.events("staged_tokens", (blocks,), expects=1)
    of_hosts = (steps, blocks)
    choice_events = g.events("known", of_hosts, expects=3, cross_rank=True)
    here = g.events("here", of_hosts, expects=1, cross_rank=True)

    _stage(g, to, sent_x, sent_choices, staged_x, staged)
    s, b = grid = g.grid(s=steps, b=blocks)
    partner = (g.rank + (s + 1) * near) % world
    rows, place = to.rows(b), to.rows(b, s * padded)
    of_host = span(b * experts + host_after(g, s) * words, words)
    for name, source, target, regions, ready, event in (
        ("tokens", sent_x, came_x, (rows, place), staged_x, here),
        (
            "chosen",
            sent_choices.token_bits,
            came.token_bits,
            (of_host, tile(s * blocks + b, words)),
            staged,
            choice_events,
        ),
        ("ids", sent_choices.ids, came.ids, (rows, place), staged, choice_events),
        (
            "weights",
            sent_choices.weights,
            came.weights,
            (rows, place),
            staged,
            choice_events,
        ),
    ):
        g.call(
            push_far(),
            grid,
            name=f"send_{name}",
            reads=[source[regions[0], :]],
            writes=[target.on(partner)[regions[1], :]],
            waits=[ready[b]],
            notifies=[event.on(partner)[s, b]],
        )
    return came_x, came, choice_events, here


def _stage(
    g: Graph,
    to: AllTokens,
    sent_x: Tensor,
    sent_choices: Choices,
    staged_x: EventTensor,
    staged: EventTensor,
) -> None:
    """Copy this rank's tokens and choices to symmetric memory, block by block."""
    experts = to.routing.experts * g.world_size
    (b,) = grid = g.grid(b=to.blocks)
    rows = to.rows(b)
    g.call(
        push_rows(),
        grid,
        name="stage_tokens",
        reads=[to.x[rows, :]],
        writes=[sent_x[rows, :]],
        notifies=[staged_x[b]],
    )
    lists = to.choices.ids[rows, :], to.choices.weights[rows, :]
    g.call(
        share_choices(replace(to.routing, experts=experts)),
        grid,
        name="stage_choices",
        reads=[to.choices.token_bits[:, b], *lists],
        writes=[
            sent_choices.token_bits[tile(b, experts), 0],
            sent_choices.ids[rows, :],
            sent_choices.weights[rows, :],
        ],
        waits=[to.routed[b]],
        notifies=[staged[b]],
    )


def _choices(g: Graph, name: str, to: AllTokens, tokens: Expr, words: Expr) -> Choices:
    """Symmetric tensors for choices, with the words of `token_bits` one after the
    other."""
    top_k = to.routing.top_k
    return Choices(
        g.symmetric(f"{name}_ids", (tokens, top_k), "int32"),
        g.symmetric(f"{name}_weights", (tokens, top_k), "float32"),
        g.symmetric(f"{name}_chosen", (words, 1), "int32"),
    )


def _share(
    g: Graph,
    to: AllTokens,
    name: str,
    grid: Grid,
    lists: Sequence[Region],
    place: tuple[Expr, Expr, Expr],
    waits: Sequence[EventRef],
) -> None:
    """Copy choices into the slot of rank `owner` on the near rank `at`, block b."""
    owner, at, b = place
    slot = to.slot(g, owner, at)
    rows, every = to.rows(b, slot * to.padded), to.all_choices
    g.call(
        share_choices(to.routing),
        grid,
        name=name,
        reads=lists,
        writes=[
            every.token_bits.on(at)[:, slot * to.blocks + b],
            every.ids.on(at)[rows, :],
            every.weights.on(at)[rows, :],
        ],
        waits=waits,
        notifies=[to.shared.on(at)[0]],
    )


def _push(
    g: Graph,
    to: AllTokens,
    name: str,
    grid: Grid,
    tokens: Sequence[Region],
    place: tuple[Expr, Expr, Expr, Expr],
    waits: Sequence[EventRef],
    order: Order | None = None,
) -> None:
    """Copy tokens into the slot of rank `owner` on the near rank `at`, part i of block
    b."""
    owner, at, b, i = place
    part = to.part(b, i, to.slot(g, owner, at) * to.padded)
    g.call(
        push_tokens(to.routing),
        grid,
        name=name,
        reads=[*tokens, to.lower(at, b)],
        writes=[to.all_x.on(at)[part, :]],
        waits=waits,
        notifies=[to.arrival_events.on(at)[0]],
        order=order,
    )


@dataclass(frozen=True)
class Sent:
    """The rows of the tokens whose partial sums a rank sends: `tokens` in total, those
    of the rank `owner` from first(owner) on. exchanged: where the experts are split
    over the ranks; shared: of this rank's tokens, is then added last."""

    rows: ExpertRows
    tokens: Expr
    first: Callable[[Expr], Expr]
    exchanged: AllTokens | None = None
    shared: SharedRows = NO_ROWS


def send_back(
    g: Graph, routing: Routing, sizes: Sizes, outgoing: Sent, y: Tensor
) -> None:
    """Add the partial sums of all ranks' tokens: each is sent to the near rank with the
    local rank of the token's owner, which adds those of its host. The sums of other
    hosts' tokens go to the owner, which adds the hosts': y [tokens, hidden]."""
    sums = _PartialSums(g, routing, sizes, outgoing, y)
    sums.send()
    if outgoing.exchanged is None or sums.hosts == 1:
        v, q = grid = g.grid(v=sums.passes, q=sums.num_groups)
        target = y[sums.rows(q), sums.columns(v)]
        sums.add_near("sum_ranks", grid, 0, target, addends=outgoing.shared)
    else:
        sums.add_hosts(outgoing.exchanged)


class _PartialSums:
    """The partial sums of tokens, and the calls that send and add them, in `passes`
    over the columns and `num_groups` groups of tokens."""

    def __init__(
        self, g: Graph, routing: Routing, sizes: Sizes, outgoing: Sent, y: Tensor
    ) -> None:
        self.g, self.routing, self.sizes = g, routing, sizes
        self.outgoing, self.y = outgoing, y
        self.near, self.hosts = g.local_size, g.world_size // g.local_size
        self.own_host = g.rank // self.near
        self.passes = outgoing.rows.outputs.passes
        self.tokens = g.largest(y.shape[0])
        most = minimum(sizes.part_tokens, outgoing.tokens // PART_TASKS)
        self.size = g.let("part", maximum(1, most))
        self.num_groups = g.let("groups", ceildiv(self.tokens, self.size))
        shape = g.world_size, self.tokens, y.shape[1]
        self.partials = g.symmetric("partials", shape, y.dtype)
        self.events = g.events(
            "returned",
            (self.passes, self.hosts, self.num_groups),
            expects=self.near,
            cross_rank=True,
        )

    def rows(self, q: Expr, first: Expr | int = 0) -> Tile:
        return span(
            first + q * self.size, minimum(self.size, self.tokens - q * self.size)
        )

    def columns(self, v: Expr) -> Tile:
        return tile(v, self.outgoing.rows.outputs.pass_columns)

    def of_owner(self, s: Expr | int, local: Expr, q: Expr) -> Tile:
        """Tokens of the rank with this local rank on host `host_after(s)`."""
        owner = host_after(self.g, s) * self.near + local
        return self.rows(q, self.outgoing.first(owner))

    def send(self) -> None:
        """Store the sums of this rank's experts on the near ranks that add them."""
        g, near = self.g, self.near
        # This rank's own come last: they are not sent.
        v, s, p, q = grid = g.grid(
            v=self.passes, s=self.hosts, p=near, q=self.num_groups
        )
        local = (g.rank + 1 + p) % near
        of_tokens, at = self.of_owner(s, local, q), near_rank(g, local)
        place = s * near + g.rank % near, self.rows(q), self.columns(v)
        self.outgoing.rows.combine(
            g,
            self.routing,
            grid,
            v,
            of_tokens,
            self.columns(v),
            self.partials.on(at)[place],
            [self.events.on(at)[v, s, q]],
        )

    def add_near(
        self,
        name: str,
        grid: Grid,
        s: Expr | int,
        target: Region,
        notifies: Sequence[EventRef] = (),
        addends: SharedRows = NO_ROWS,
    ) -> None:
        """Add the sums of the near ranks for tokens of host `host_after(s)`."""
        g, near, to = self.g, self.near, self.outgoing.exchanged
        *_, v, q = grid
        function, of_choices = sum_ranks(self.y.dtype, near), []
        if to is not None:
            has_none = self.hosts == 1 and self.sizes.has_count
            function = sum_expert_ranks(
                self.routing, near, addends.kind, has_none=has_none
            )
            ids = to.all_choices.ids[self.of_owner(s, g.rank % near, q), :]
            of_choices = [ids, to.lower(self.own_host * near)]
        g.call(
            function,
            grid,
            name=name,
            reads=[
                self.partials[span(s * near, near), self.rows(q), self.columns(v)],
                *of_choices,
                *addends.of(self.rows(q), self.columns(v)),
            ],
            writes=[target],
            waits=[self.events[v, s, q], *addends.done_events],
            notifies=notifies,
        )

    def add_hosts(self, to: AllTokens) -> None:
        """Send the sums for tokens of other hosts to their owners, and add the hosts'
        sums of this rank's tokens."""
        g, near, hosts, y = self.g, self.near, self.hosts, self.y
        rows, columns, num_groups = self.rows, self.columns, self.num_groups
        shape = self.tokens, y.shape[1]
        staged = g.symmetric("staged_sums", (hosts - 1, *shape), y.dtype)
        sums = g.symmetric("sums", (hosts, *shape), y.dtype)
        summed = g.events("summed", (hosts - 1, num_groups), expects=self.passes)
        complete = g.events(
            "complete", (num_groups,), expects=hosts - 1 + self.passes, cross_rank=True
        )
        s, v, q = grid = g.grid(s=hosts - 1, v=self.passes, q=num_groups)
        target = staged[s, rows(q), columns(v)]
        self.add_near("sum_near", grid, s, target, [summed[s, q]])
        s, q = grid = g.grid(s=hosts - 1, q=num_groups)
        owner = host_after(g, s) * near + g.rank % near
        g.call(
            push_far(),
            grid,
            name="send_sums",
            reads=[staged[s, rows(q), :]],
            writes=[sums.on(owner)[self.own_host, rows(q), :]],
            waits=[summed[s, q]],
            notifies=[complete.on(owner)[q]],
        )
        v, q = grid = g.grid(v=self.passes, q=num_groups)
        target = sums[self.own_host, rows(q), columns(v)]
        self.add_near("sum_own", grid, hosts - 1, target, [complete[q]])
        of_hosts = replace(self.routing, experts=near * self.routing.experts)
        shared, has_none = self.outgoing.shared, self.sizes.has_count
        g.call(
            sum_expert_ranks(of_hosts, hosts, shared.kind, has_none=has_none),
            grid,
            name="sum_hosts",
            reads=[
                sums[:, rows(q), columns(v)],
                to.choices.ids[rows(q), :],
                to.lower(0),
                *shared.of(rows(q), columns(v)),
            ],
            writes=[y[rows(q), columns(v)]],
            waits=[complete[q], *shared.done_events],
        )
