"""The mixture of experts of a transformer as one persistent kernel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from etc_dist.compiler import world_or_current
from etc_dist.errors import expect_choice, expect_range, expect_type
from etc_dist.layers.moe_few_tokens import (
    FEW_TOKENS,
    moe_few_tokens_graph,
    most_tokens,
)
from etc_dist.layers.moe_graph import PARALLEL, moe_graph
from etc_dist.layers.sparse_block import read_sparse_block
from etc_dist.ops.argument_table import ArgumentTable
from etc_dist.ops.deterministic import BATCH
from etc_dist.ops.operation import (
    Candidate,
    Operation,
    shapes_up_to,
)
from etc_dist.world import World

__all__ = ["MoE", "moe_graph"]

EXPERTS = tuple(range(8, 257, 8))
MAX_CHOICES = 16
PACKED_INNER = 4096
"""The smallest inner width of a rank for which rows are first copied to their tiles.
The cost of the copies does not depend on the width, and the gain grows with it."""


class MoE(Operation):
    """Each token through the top_k experts with its largest router logits, one kernel.

    y = sum over k of weight_k * (silu(x @ gate_k.T) * (x @ up_k.T)) @ down_k.T.

    On one rank: router [E, H]; gate_up [E, 2 I, H], gate's rows first; down [E, H, I],
    all kept by reference. moe(x, out=None, stream=None): x [M, H] -> [M, H]; M may be
    0. E is a multiple of 8 up to 256, top_k at most 16; on GPUs H and I are multiples
    of 8. The dtype is that of the weights, bfloat16 or float16. Arrays and errors as
    for `MatmulReduceScatter`. Making a layer is collective and compiles its programs.

    On W ranks, each with the whole router:

    parallel="tensor": gate_up [E, 2 I / W, H] and down [E, H, I / W] are a shard of
    every expert. x [M, H] is the same on all ranks, M a multiple of W. The result
    [M / W, H] is that of the rank-th part of the tokens. A rank's sum for a token is
    rounded once.
    parallel="expert": gate_up [E / W, 2 I, H] and down [E / W, H, I] are the experts of
    this rank, and x [M, H] -> [M, H] its tokens, equally many on all ranks.

    weight_k is the softmax over all E logits, with `normalize` divided by the sum over
    the top_k. Logits, weights and sums are in fp32, activations and expert results are
    rounded once each: the same bits on every run.

    few_tokens: up to so many tokens on one rank (at most 16, and fewer if a token's
    experts are large; 0 for none) use a program that computes each token separately,
    and keeps its experts' results in fp32 until they are summed. schedule, trace: as
    for `etc_dist.compile`; the program for few tokens is static. deterministic="batch":
    a token has the same bits for any M; few_tokens is then 0.
    """

    packed_inner = PACKED_INNER
    """The smallest inner width for copies of rows."""

    def __init__(
        self,
        router: Any,
        gate_up: Any,
        down: Any,
        *,
        top_k: int,
        normalize: bool = True,
        parallel: str = "tensor",
        world: World | None = None,
        schedule: str = "static",
        trace: bool | None = None,
        few_tokens: int = FEW_TOKENS,
        deterministic: str = "run",
    ):
        world = world_or_current(world)
        self.weights = router, gate_up, down
        with world.refusing("the arguments of MoE"):
            expect_choice(parallel, PARALLEL, "parallel")
            table = _table(world, parallel)
            known = table.hold(self.weights)
            experts = known.dims["experts"]
            if parallel == "expert":
                experts *= world.size
            _check_routing(table, experts, top_k, normalize)
            self.top_k = int(top_k)
            few_tokens = expect_range(few_tokens, 0, None, "few_tokens")
        self.dtype, self.normalize, self.parallel = known.dtype, normalize, parallel
        routing = {"experts": experts, "top_k": self.top_k, "normalize": normalize}
        few_tokens = _most_tokens(few_tokens, self.top_k, known.dims, world.size)
        if deterministic == BATCH:
            few_tokens, routing["tiles_logits"] = 0, False
        super().__init__(
            table,
            _candidates(
                *(routing, parallel, few_tokens, self.sizes),
                packs=known.dims["inner"] >= self.packed_inner,
            ),
            world,
            schedule=schedule,
            trace=trace,
            deterministic=deterministic,
            options={
                **routing,
                "parallel": parallel,
                "dtype": known.dtype,
                "few_tokens": few_tokens,
            },
            held=self.weights,
            known=known,
        )

    @classmethod
    def from_torch(
        cls,
        block: Any,
        *,
        parallel: str = "tensor",
        world: World | None = None,
        schedule: str = "static",
        trace: bool | None = None,
        few_tokens: int = FEW_TOKENS,
        deterministic: str = "run",
    ) -> MoE:
        """The layer of a Qwen3-MoE or Mixtral block of Hugging Face transformers: its
        gate, experts, top_k and normalization.

        Fused expert weights (transformers 5) are kept by reference; those of a list of
        experts are stacked into new tensors. On several ranks, each passes the whole
        block and uses its shard of the experts, which is a copy if `parallel` is
        "tensor". Unlike the block, the layer takes x with two axes, and computes logits
        and weights in fp32."""
        world = world_or_current(world)
        with world.refusing("the block of MoE.from_torch"):
            expect_choice(parallel, PARALLEL, "parallel")
            found = read_sparse_block(block).share(parallel, world.rank, world.size)
        return cls(
            found.router,
            found.gate_up,
            found.down,
            top_k=found.top_k,
            normalize=found.normalize,
            parallel=parallel,
            world=world,
            schedule=schedule,
            trace=trace,
            few_tokens=few_tokens,
            deterministic=deterministic,
        )

    def __call__(self, x: Any, out: Any = None, *, stream: Any = None) -> Any:
        return self._call((x,), out, stream)


class SharedMoE(Operation):
    """`MoE` with the weights as arguments, so that layers of one shape share a program
    and its buffers: op(x, router, gate_up, down, out=None, stream=None). experts: those
    of all ranks; hidden, inner: H, and the inner width of this rank."""

    def __init__(
        self,
        *,
        experts: int,
        hidden: int,
        inner: int,
        top_k: int,
        normalize: bool,
        parallel: str,
        world: World | None = None,
        deterministic: str = "run",
    ):
        world = world_or_current(world)
        with world.refusing("the arguments of SharedMoE"):
            expect_choice(parallel, PARALLEL, "parallel")
            table = _table(world, parallel)
            _check_routing(table, experts, top_k, normalize)
        routing = {"experts": experts, "top_k": top_k, "normalize": normalize}
        dims = {"hidden": hidden, "inner": inner}
        few_tokens = _most_tokens(FEW_TOKENS, top_k, dims, world.size)
        if deterministic == BATCH:
            few_tokens, routing["tiles_logits"] = 0, False
        super().__init__(
            table,
            _candidates(
                *(routing, parallel, few_tokens, self.sizes),
                packs=inner >= MoE.packed_inner,
            ),
            world,
            schedule="static",
            trace=None,
            deterministic=deterministic,
            options={**routing, **dims, "parallel": parallel},
        )

    def __call__(
        self,
        x: Any,
        router: Any,
        gate_up: Any,
        down: Any,
        out: Any = None,
        *,
        stream: Any = None,
    ) -> Any:
        return self._call((x, router, gate_up, down), out, stream)


def _most_tokens(
    few_tokens: int, top_k: int, dims: Mapping[str, int], ranks: int
) -> int:
    """The tokens up to which the program for few tokens is used."""
    most = most_tokens(top_k, dims["hidden"], dims["inner"]) if ranks == 1 else 0
    return min(few_tokens, most)


def _candidates(
    routing: Mapping[str, Any],
    parallel: str,
    few_tokens: int,
    sizes: Mapping[str, Any],
    packs: bool,
) -> list[Candidate]:
    """The programs for up to `few_tokens`, and for more."""
    rest = Candidate(
        moe_graph,
        {**routing, "parallel": parallel, "packs": packs, **sizes},
        over_hosts=parallel == "expert",
    )
    if few_tokens <= 0:
        return [rest]
    few = Candidate(
        moe_few_tokens_graph,
        routing,
        serves=lambda dims: dims["tokens"] <= few_tokens,
        capacity=shapes_up_to("tokens", few_tokens),
        schedule="static",  # the order in which its tasks become ready is known
    )
    return [few, rest]


def _check_routing(
    table: ArgumentTable, experts: int, top_k: Any, normalize: Any
) -> None:
    if experts not in EXPERTS:
        limits = f"{EXPERTS[0]} to {EXPERTS[-1]} experts, a multiple of 8"
        raise table.error(limits, f"{experts} experts")
    expect_range(top_k, 1, min(experts, MAX_CHOICES), "top_k")
    expect_type(normalize, bool, "normalize")


def _table(world: World, parallel: str) -> ArgumentTable:
    """The arguments by the graph's dims; `experts` and `inner` are a rank's own."""
    is_shared = parallel == "tensor" and world.size > 1  # all ranks have all tokens
    tokens = "shard" if is_shared else "tokens"
    experts = "ranks * experts" if parallel == "expert" else "experts"
    return ArgumentTable(
        "MoE",
        world,
        [
            f"x [ranks * {tokens}, hidden]" if is_shared else f"x [{tokens}, hidden]",
            f"router [{experts}, hidden]",
            "gate_up [experts, 2 * inner, hidden]",
            "down [experts, hidden, inner]",
        ],
        f"out [{tokens}, hidden]",
        empty=tokens,
    )
