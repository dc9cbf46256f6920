"""The mixture of experts of a transformer as one persistent kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

from etc_dist.compiler import world_or_current
from etc_dist.errors import ArgumentError, expect_choice, expect_range, expect_type
from etc_dist.functions.activation import SWIGLU, Activation
from etc_dist.functions.router import Router, as_router
from etc_dist.functions.routing import GATED, PLAIN, SHARED, Mixture
from etc_dist.layers.moe_few_tokens import (
    FEW_TOKENS,
    moe_few_tokens_graph,
    most_tokens,
)
from etc_dist.layers.moe_graph import PARALLEL, moe_graph
from etc_dist.layers.sparse_block import read_sparse_block
from etc_dist.ops.argument_table import ArgumentTable
from etc_dist.ops.deterministic import BATCH
from etc_dist.ops.operation import Candidate, Operation, shapes_up_to
from etc_dist.ops.scaled_weight import ScaledWeight
from etc_dist.world import World

__all__ = ["MoE", "moe_graph"]

BIASES = "gate_up_bias [experts, 2 * inner]", "down_bias [experts, hidden]"
SHARED_ARRAYS = (
    "shared_gate_up [2 * shared_inner, hidden]",
    "shared_down [hidden, shared_inner]",
    "shared_gate [hidden]",
)
SCALABLE = "gate_up", "down", "shared_gate_up", "shared_down"
"""The weights that may be of float8, all of them."""
MAX_CHOICES = 16
PACKED_INNER = 4096
"""The smallest inner width of a rank for which rows are first copied to their tiles.
The cost of the copies does not depend on the width, and the gain grows with it."""


class SharedMoE(Operation):
    """`MoE` with the weights as arguments, so that layers of one shape share a program
    and its buffers: `call((x, router, gate_up, down, ...), out, stream)`; the biases of
    the router and of experts follow, where there are any, and the shared expert's
    arrays. hidden, inner, shared_inner: a rank's widths. is_scaled: the weights of
    experts are ScaledWeights."""

    packed_inner = PACKED_INNER
    """The smallest inner width for copies of rows."""

    def __init__(
        self,
        *,
        mixture: Mixture,
        hidden: int,
        inner: int,
        parallel: str,
        shared_inner: int = 0,
        has_count: bool = False,
        is_scaled: bool = False,
        world: World | None = None,
        schedule: str = "static",
        trace: bool | None = None,
        few_tokens: int = FEW_TOKENS,
        deterministic: str = "run",
    ):
        world = world_or_current(world)
        with world.refusing(f"the arguments of {type(self).__name__}"):
            expect_choice(parallel, PARALLEL, "parallel")
            mixture.check(MAX_CHOICES)
            few_tokens = expect_range(few_tokens, 0, None, "few_tokens")
            expect_type(has_count, bool, "has_count")
        num_experts = mixture.experts // (world.size if parallel == "expert" else 1)
        dims = {"experts": num_experts, "hidden": hidden, "inner": inner}
        if mixture.shared:
            dims["shared_inner"] = shared_inner
        self.known = replace(self.known, dims=dims)
        most = 0
        if world.size == 1 and deterministic != BATCH and not mixture.has_biases:
            # Inner columns of a token.
            token_columns = mixture.router.top_k * inner + shared_inner
            most = most_tokens(1, hidden, token_columns, is_scaled=is_scaled)
        self.mixture, self.parallel, self.has_count = mixture, parallel, has_count
        self.few_tokens = min(few_tokens, most)
        self.options = {
            "mixture": mixture,
            "has_count": has_count,
            "parallel": parallel,
            "is_scaled": is_scaled,
            "dtype": self.known.dtype,
            "w_layout": self.known.w_layout,
            "few_tokens": self.few_tokens,
        }
        super().__init__(
            world=world, schedule=schedule, trace=trace, deterministic=deterministic
        )

    @classmethod
    def table(
        cls,
        ranks: int,
        *,
        mixture: Mixture | None = None,
        parallel: str = "",
        has_count: bool = False,
        is_scaled: bool = False,
        **options: Any,
    ) -> ArgumentTable:
        """Internal: a rank's own tokens, or those of all, and its own experts."""
        mixture = mixture or Mixture(0, Router(1))
        is_shared = parallel == "tensor" and ranks > 1  # all ranks have all tokens
        tokens = "shard" if is_shared else "tokens"
        experts = "ranks * experts" if parallel == "expert" else "experts"
        inputs = [
            f"x [ranks * {tokens}, hidden]" if is_shared else f"x [{tokens}, hidden]",
            *(["count [1] int32"] if has_count else []),
            f"router [{experts}, hidden]",
            "gate_up [experts, 2 * inner, hidden]",
            "down [experts, hidden, inner]",
            *(f"{name} [{experts}] float32" for name in mixture.router.bias_names),
            *(BIASES if mixture.has_biases else ()),
            *SHARED_ARRAYS[: ("", "", *SHARED).index(mixture.shared)],
        ]
        output = f"out [{tokens}, hidden]"
        own_dim = tokens if parallel == "expert" and ranks > 1 else ""
        scalable = SCALABLE if mixture.shared else SCALABLE[:2]
        return ArgumentTable(
            cls.__name__,
            ranks,
            inputs,
            output,
            scalable=scalable if is_scaled else (),
            empty=tokens,
            own_dim=own_dim,
        )

    def candidates(self) -> list[Candidate]:
        """Internal: the programs for up to `few_tokens`, and for more."""
        few_tokens, mixture = self.few_tokens, {"mixture": self.mixture}
        packs = self.known.dims["inner"] >= self.packed_inner
        options = {"parallel": self.parallel, "packs": packs, **self.sizes}
        options |= {"has_count": self.has_count}
        if self.deterministic == BATCH:
            options["in_order"] = True
        many = Candidate(
            moe_graph, {**mixture, **options}, over_hosts=self.parallel == "expert"
        )
        if few_tokens <= 0:
            return [many]
        few = Candidate(
            moe_few_tokens_graph,
            mixture,
            serves=lambda dims: dims["tokens"] <= few_tokens,
            capacity=shapes_up_to("tokens", few_tokens),
            schedule="static",  # the order in which its tasks become ready is known
        )
        return [few, many]


class MoE(SharedMoE):
    """Each token through the top_k experts with its largest router logits, one kernel.

    y = sum over k of weight_k * (silu(x @ gate_k.T) * (x @ up_k.T)) @ down_k.T, to
    which a shared expert may be added.

    On one rank: router [E, H]; gate_up [E, 2 I, H], gate's rows first; down [E, H, I],
    all kept by reference. moe(x, out=None, stream=None): x [M, H] -> [M, H]; M may be
    0. E is at most 512, top_k at most 16; on GPUs H and I are multiples of 8. The dtype
    is that of the weights, bfloat16 or float16. Arrays and errors as for
    `MatmulReduceScatter`. Making a layer is collective and compiles its programs.

    On W ranks, each with the whole router:

    parallel="tensor": gate_up [E, 2 I / W, H] and down [E, H, I / W] are a shard of
    every expert. x [M, H] is the same on all ranks, M a multiple of W. The result
    [M / W, H] is that of the rank-th part of the tokens. A rank's sum for a token is
    rounded once.
    parallel="expert": gate_up [E / W, 2 I, H] and down [E / W, H, I] are the experts of
    this rank, and x [M, H] -> [M, H] its tokens, whose number may differ between ranks.
    Captured in a CUDA graph, a call may be replayed with any captured calls of the
    other ranks that had the same largest M.

    top_k: a number, or an `etc_dist.Router`, which describes the choice; then
    `normalize` is a field of it, and no argument. With a number, weight_k is the
    softmax over all E logits, divided by the sum over the top_k unless `normalize` is
    False. router_bias, correction: [E] in float32, the biases of a `Router`, kept by
    reference.

    shared: (gate_up [2 S, H], down [H, S]), an expert that every token takes, whose
    result is added; concatenate several such experts into one. With
    shared_gate [H], it is multiplied by sigmoid(x @ shared_gate). parallel="tensor":
    a shard of its inner width, S / W; "expert": the whole expert.

    activation: an `etc_dist.Activation`, of all experts. expert_biases: (gate_up_bias
    [E, 2 I], down_bias [E, H]) of the routed experts, of the weights' dtype. With
    parallel="tensor" gate_up_bias [E, 2 I / W] is the rank's, and each rank adds its
    down_bias: pass zeros on all but one. few_tokens is then 0.

    gate_up, down and those of `shared` may all be `ScaledWeight`s, with scales of one
    kind and dtype; router, shared_gate and biases then have the dtype of x. Scales of
    blocks are those of gate_up as one matrix of 2 I rows, of a rank's shard: where I is
    no multiple of 128, a block has rows of gate and of up. On GPUs H and I are
    multiples of 16.

    Logits, weights and sums are in fp32, activations and expert results are rounded
    once each: the same bits on every run.

    has_count: calls pass count, an int32 array [1], moe(x, out, count=count): only the
    first of x's rows are tokens, as many as count says when the kernel reads it, which
    may change between replays of a CUDA graph. Other rows of the result have no
    meaning. Only with parallel="expert" on several ranks does this save work.

    few_tokens: up to so many tokens on one rank (at most 16, and fewer if a token's
    experts are large; 0 for none) use a program that computes each token separately,
    and keeps its experts' results in fp32 until they are summed. schedule, trace: as
    for `etc_dist.compile`; the program for few tokens is static. deterministic="batch":
    a token has the same bits for any M; few_tokens is then 0.
    """

    def __init__(
        self,
        router: Any,
        gate_up: Any,
        down: Any,
        *,
        top_k: int | Router,
        normalize: bool | None = None,
        router_bias: Any = None,
        correction: Any = None,
        shared: Sequence[Any] | None = None,
        shared_gate: Any = None,
        activation: Activation = SWIGLU,
        expert_biases: Sequence[Any] | None = None,
        has_count: bool = False,
        parallel: str = "tensor",
        world: World | None = None,
        schedule: str = "static",
        trace: bool | None = None,
        few_tokens: int = FEW_TOKENS,
        deterministic: str = "run",
    ):
        world = world_or_current(world)
        with world.refusing(f"the arguments of {type(self).__name__}"):
            mixture, *arrays = mixture_and_arrays(
                type(self).__name__,
                top_k,
                normalize,
                router_bias,
                correction,
                shared,
                shared_gate,
                activation,
                expert_biases,
            )
        options: dict[str, Any] = {"parallel": parallel, "has_count": has_count}
        of_experts = gate_up, down, *arrays[-1]
        options["is_scaled"] = any(isinstance(w, ScaledWeight) for w in of_experts)
        self._hold(
            world, router, gate_up, down, *chain(*arrays), mixture=mixture, **options
        )
        dims = dict(self.known.dims)
        experts = dims.pop("experts") * (world.size if parallel == "expert" else 1)
        options["mixture"] = replace(mixture, experts=experts)
        self.dtype = self.known.dtype
        super().__init__(
            **{**dims, **options},
            world=world,
            schedule=schedule,
            trace=trace,
            few_tokens=few_tokens,
            deterministic=deterministic,
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
        """The layer of a sparse block of Hugging Face transformers, of one of the
        families of docs/layers.md: its router, its experts, and its shared expert.

        Fused expert weights (transformers 5) are kept by reference; those of a list of
        experts are stacked into new tensors, those of a shared expert joined, and those
        of gpt-oss rearranged. A
        router in float32 is converted to the dtype of the experts if that is exact,
        and refused otherwise. On several ranks, each passes the whole
        block and uses its shard of the experts, which is a copy if `parallel` is
        "tensor". Unlike the block, the layer takes x with two axes, and computes logits
        and weights in fp32."""
        world = world_or_current(world)
        with world.refusing("the block of MoE.from_torch"):
            expect_choice(parallel, PARALLEL, "parallel")
            part = read_sparse_block(block).share(parallel, world.rank, world.size)
        return cls(
            part.router,
            part.gate_up,
            part.down,
            **part.arguments(),
            parallel=parallel,
            world=world,
            schedule=schedule,
            trace=trace,
            few_tokens=few_tokens,
            deterministic=deterministic,
        )

    def __call__(
        self, x: Any, out: Any = None, *, count: Any = None, stream: Any = None
    ) -> Any:
        """Run on x; returns `out`, or a new array. Collective."""
        if (count is not None) is not self.has_count:
            self.world.refuse(_wrong_count(self.has_count))
        return self.call((x, count) if self.has_count else (x,), out, stream)


def _wrong_count(has_count: bool) -> ArgumentError:
    return _unfit(
        "MoE",
        "count, an int32 array [1]" if has_count else "no count",
        "None" if has_count else "count",
        "pass count in the calls of a layer made with has_count=True, only",
    )


class MixtureAndArrays(NamedTuple):
    """Internal: a mixture, and the arrays after down."""

    mixture: Mixture
    of_router: list[Any]
    of_experts: list[Any]
    of_shared: list[Any]


def mixture_and_arrays(
    where: str,
    top_k: int | Router,
    normalize: bool | None,
    router_bias: Any,
    correction: Any,
    shared: Any,
    shared_gate: Any,
    activation: Activation,
    expert_biases: Any,
    experts: int = 0,
) -> MixtureAndArrays:
    """Internal: the mixture that arguments of a layer describe, as for `MoE`. The
    router has those biases that are not None."""
    router = as_router(top_k, normalize)
    biases = {"router_bias": router_bias, "correction": correction}
    missing = [name for name in router.bias_names if biases[name] is None]
    if missing:
        raise _unfit(
            where,
            f"{', '.join(missing)}, as the router says",
            "None",
            "pass the array, or correct the router",
        )
    if expert_biases is not None and not _is_pair(expert_biases):
        raise _unfit(
            where,
            "expert_biases: a pair of arrays, ([E, 2 I], [E, H])",
            _kinds(expert_biases),
            "pass both arrays, or omit them",
        )
    if not _is_pair(shared) and not (shared is None and shared_gate is None):
        raise _unfit(
            where,
            "shared: a pair of arrays, (gate_up [2 S, H], down [H, S])",
            f"{_kinds(shared)}, shared_gate {type(shared_gate).__name__}",
            "pass both arrays, or neither shared nor shared_gate",
        )
    of_router, of_shared = (
        [array for array in arrays if array is not None]
        for arrays in (biases.values(), [*(shared or ()), shared_gate])
    )
    flags = router_bias is not None, correction is not None
    if flags != (router.has_bias, router.has_correction):
        router = replace(router, has_bias=flags[0], has_correction=flags[1])
    kind = ("", "", PLAIN, GATED)[len(of_shared)]
    has_biases = expert_biases is not None
    mixture = Mixture(experts, router, kind, activation, has_biases)
    return MixtureAndArrays(mixture, of_router, [*(expert_biases or ())], of_shared)


def _is_pair(value: Any) -> bool:
    is_pair = isinstance(value, Sequence) and len(value) == 2
    return is_pair and all(item is not None for item in value)


def _kinds(value: Any) -> str:
    if not isinstance(value, list | tuple):
        return type(value).__name__
    return f"({', '.join(type(item).__name__ for item in value)})"


def _unfit(where: str, wanted: str, got: str, fix: str) -> ArgumentError:
    problem = f"the arguments do not fit {where}"
    return ArgumentError(problem, where=where, wanted=wanted, got=got, fix=fix)
