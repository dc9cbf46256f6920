"""The mixture of experts of a transformer as one persistent kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from etc_dist.layers.moe_few_tokens import (
    FEW_TOKENS,
    moe_few_tokens_graph,
    most_tokens,
)
from etc_dist.layers.moe_graph import PARALLEL, moe_graph
from etc_dist.layers.sparse_block import read_sparse_block
from etc_dist.ops.arguments import refuse_unknown, truth, whole_number
from etc_dist.ops.operation import Fitted, Operation, shapes_up_to
from etc_dist.ops.product import DTYPES
from etc_dist.program import Program, as_refusal
from etc_dist.runtime.arrays import (
    Array,
    described,
    dtype_of,
    empty_like,
    inspect,
    place_on,
)
from etc_dist.runtime.stream import stream_for
from etc_dist.world import World, given_world
from etc_dist.world.agreement import sign

__all__ = ["MoE", "moe_graph"]

EXPERTS = tuple(range(8, 257, 8))
MOST_CHOICES = 16


class MoE(Operation):
    """Each token through the top_k experts that its router logits pick, one kernel.

    y = sum over k of weight_k * (silu(x @ gate_k.T) * (x @ up_k.T)) @ down_k.T.
    router [E, H]; gate_up [E, 2 I, H], gate's rows first; down [E, H, I]: kept by
    reference. moe(x, out=None, stream=None): x [M, H] -> [M, H], M = 0 included. The
    weights are the softmax over all E logits, with `normalize` divided by their sum
    over the top_k. bf16 or fp16; E a multiple of 8 up to 256, top_k up to 16; logits,
    weights and sums in fp32, activations and expert results rounded once each; the
    same bits on every run. On GPUs H and I are multiples of 8. Arrays and errors as in
    MatmulReduceScatter. Making one is collective.

    On one rank, up to few_tokens tokens (at most 16, and fewer where a token's experts
    are large; 0 for none) go through a program of their own, which does each token
    alone, and keeps its experts' results in fp32 until they are summed. `options` are
    sizes of the other program.

    On W ranks, each with the whole router, parallel="tensor": gate_up [E, 2 I / W, H]
    and down [E, H, I / W] are a share of every expert; x [M, H] is the same on all
    ranks, M a multiple of W, and the result [M / W, H] is of this rank's tokens, the
    rank-th part of them. A rank's sum for a token is rounded once.
    """

    names = ("x", "router", "gate_up", "down")

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
        options: Mapping[str, Any] | None = None,
    ):
        self.world = world = given_world(world)
        dtype = dtype_of(gate_up)
        known = {"dtype": (dtype, DTYPES), "parallel": (parallel, PARALLEL)}
        refuse_unknown(world, "MoE", **known)
        self.dtype, self.weights = dtype, (router, gate_up, down)
        self.parallel = parallel
        try:
            experts = self._count_experts()
            most = min(experts, MOST_CHOICES)
            self.top_k = whole_number("top_k", top_k, 1, most)
            self.normalize = truth("normalize", normalize)
            few = whole_number("few_tokens", few_tokens)
        except Exception as error:
            world.refuse(as_refusal(error, "the arguments of MoE"))
        routing = {
            "dtype": dtype,
            "experts": experts,
            "top_k": self.top_k,
            "normalize": self.normalize,
        }
        _, hidden, inner = (int(n) for n in down.shape)
        most = most_tokens(self.top_k, hidden, inner) if world.size == 1 else 0
        self._few_tokens = min(few, most)
        own = {**routing, "parallel": parallel}
        others = {"few_tokens": self._few_tokens}
        super().__init__(moe_graph, own, world, schedule, trace, options, others)
        if self._few_tokens > 0:
            program = self._compile(moe_few_tokens_graph, routing, schedule, trace)
            program.room = shapes_up_to("tokens", self._few_tokens)

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
        options: Mapping[str, Any] | None = None,
    ) -> MoE:
        """The layer of a Qwen3-MoE or Mixtral block of Hugging Face transformers: its
        gate and experts, top_k, and whether it normalises.

        Fused expert weights (transformers 5) are kept by reference; those of a list of
        experts are stacked into new tensors. On several ranks, each passes the whole
        block and gets its share of the experts, a copy where `parallel` is "tensor".
        Unlike the block, the layer takes x of two axes, and computes logits and weights
        in fp32."""
        world = given_world(world)
        refuse_unknown(world, "MoE", parallel=(parallel, PARALLEL))
        try:
            found = read_sparse_block(block).share(parallel, world.rank, world.size)
        except Exception as error:
            world.refuse(as_refusal(error, "the block of MoE.from_torch"))
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
            options=options,
        )

    def __call__(self, x: Any, out: Any = None, *, stream: Any = None) -> Any:
        shape = getattr(x, "shape", None)
        if isinstance(shape, Sequence) and tuple(shape[:1]) == (0,):
            return self._of_no_tokens(x, out, stream)
        return self._call((x, *self.weights), out, stream)

    def _program_for(self, dims: Mapping[str, int]) -> Program:
        tokens = dims.get("tokens", self._few_tokens + 1)
        return self._programs[tokens <= self._few_tokens]

    def _output_shape(self, *shapes: Sequence[int]) -> tuple[int, ...]:
        return shapes[0][0] // self._split("tensor"), *shapes[0][1:]

    def _check(self, inputs: Sequence[Array]) -> None:
        x, router, *_ = inputs
        hidden = router.shape[1]
        if len(x.shape) != 2 or x.shape[1] != hidden or x.dtype != self.dtype:
            raise self.misfit(f"x [M, {hidden}] {self.dtype}", f"x {x}")
        if x.shape[0] % self._split("tensor"):
            wanted = f"M a multiple of {self.world.size}"
            raise self.misfit(wanted, f"M = {x.shape[0]}")

    def _tensors(self, inputs: Sequence[Array], y: Array) -> Fitted:
        x, router, gate_up, down = inputs
        tokens = "shard" if self._split("tensor") > 1 else "tokens"
        dims = {tokens: y.shape[0], "hidden": x.shape[1], "inner": down.shape[2]}
        return {
            "x": x,
            "router": router,
            "gate_up": gate_up,
            "down": down,
            "y": y,
        }, dims

    def _of_no_tokens(self, x: Any, out: Any, stream: Any) -> Any:
        """The result for no tokens, which all ranks must have: nothing is launched."""
        try:
            self.program.check_open()
            stream_for(self.world.backend, stream, x)
            seen = inspect("x", x)
            self._check([seen, inspect("router", self.weights[0])])
            made = empty_like(seen, seen.shape) if out is None else out
            y = inspect("out", made)
            if (y.shape, y.dtype) != (seen.shape, seen.dtype):
                raise self.misfit(f"out {list(seen.shape)} {seen.dtype}", f"out {y}")
        except Exception as error:
            self.world.refuse(as_refusal(error, "the arguments of MoE"))
        text = f"{self.program.plan.graph.name} of no tokens"
        self.world.match_call(sign(text), lambda: text)
        return made

    def _split(self, parallel: str) -> int:
        """The number of ranks that share what `parallel` splits."""
        return self.world.size if self.parallel == parallel else 1

    def _count_experts(self) -> int:
        """The number of experts; raises for what makes no layer."""
        names, ranks = self.names[1:], self._split("expert")
        weights = [inspect(n, w) for n, w in zip(names, self.weights, strict=True)]
        router, gate_up, down = (array.shape for array in weights)
        shapes = len(router) == 2 and len(down) == 3 and 0 not in (*router, *down)
        if shapes:
            (experts, hidden), inner = router, down[2]
            self._check_experts(experts)
            shapes &= gate_up == (experts // ranks, 2 * inner, hidden)
            shapes &= down == (experts // ranks, hidden, inner)
        device = self.world.device
        placed = all(array.lies_on(device) for array in weights)
        if not shapes or not placed or len({array.dtype for array in weights}) > 1:
            e, i = (
                f"{n} / {k}" if (k := self._split(parallel)) > 1 else n
                for n, parallel in (("E", "expert"), ("I", "tensor"))
            )
            raise self.misfit(
                f"router [E, H], gate_up [{e}, 2 {i}, H], down [{e}, H, {i}], of one "
                f"dtype, {place_on(device)}",
                described(*weights),
            )
        return experts

    def _check_experts(self, experts: int) -> None:
        """Raise for numbers of experts that no layer has."""
        if experts not in EXPERTS:
            limits = f"{EXPERTS[0]} to {EXPERTS[-1]} experts, a multiple of 8"
            raise self.misfit(limits, f"{experts} experts")
        ranks = self._split("expert")
        if experts % ranks:
            wanted = f"experts in a multiple of {ranks}, the number of ranks"
            raise self.misfit(wanted, f"{experts} experts")
