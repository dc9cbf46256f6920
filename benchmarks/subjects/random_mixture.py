"""Mixtures of experts on one GPU whose sizes, routers and routings follow from the
commit, against torch's grouped GEMMs in a CUDA graph.

A seed gives 12. Tokens, experts, hidden and inner size are uniform in their logarithms,
the latter two multiples of 64, drawn again until the weights have at most 20 GB. Tokens
whose choice is almost a tie are drawn again, so that rounding changes no choice.

Up to 25 inputs take turns, and so do copies of weights of less than 1 GB, until all
calls together have read so much. All programs of a seed are compiled at once. A gate
that is not met is recorded as a failure of the run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import count, cycle
from typing import Any

import numpy as np

from benchmarks.device import Call, Device, Gpu, captured
from benchmarks.random_sizes import PLAIN, STEP, Draw, log_uniform
from benchmarks.subjects import _moe_torch
from benchmarks.subjects.matmul import taking_turns
from benchmarks.subjects.moe import ROUTINGS, Model, MoEWorkload
from benchmarks.subjects.random_sizes import (
    CPU_DRAWS,
    PROTOCOL,
    Random,
    compile_at_once,
    copy_of,
    subject,
)
from benchmarks.workload import Calls, Rival, in_turn, limited
from etc_dist.functions.router import Router
from etc_dist.functions.routing import Mixture
from etc_dist.ir import GraphFunction
from etc_dist.layers.moe import SharedMoE
from etc_dist.layers.sparse_block import SparseBlock
from etc_dist.world import World

NUM_DRAWS = 12
MOST_BYTES = 20e9
"""Of the weights of all experts."""
MOST_TOP_K = 16
ROUTERS: Mapping[str, Router] = {
    "softmax, not normalized": Router(1, normalize=False),
    "softmax of those chosen": Router(1, score="softmax_chosen"),
    "sigmoid, correction": Router(1, score="sigmoid", scale=2.5, has_correction=True),
    "sqrt softplus, correction": Router(
        1, score="sqrt_softplus", scale=1.5, has_correction=True
    ),
    "sigmoid, correction, 4 of 8 groups": Router(
        1, score="sigmoid", scale=2.5, num_groups=8, topk_group=4, has_correction=True
    ),
}
"""By their names in records, with any top_k."""
CORRECTION = 0.1
"""The deviation of corrections of scores."""
NEAR = 1e-3
"""A difference from a tie, relative to the deviation of a token's values: far above
rounding errors of logits in fp32."""
MOST_TURNS = 25
"""As many as the calls of a measurement."""
Range = tuple[int, int]


@dataclass(frozen=True)
class Ranges:
    """Those of the sizes, each uniform in its logarithm."""

    rows: Range = (1, 16384)
    experts: Range = (16, 512)
    hidden: Range = (512, 8192)
    inner: Range = (128, 4096)


SMALL = Ranges((1, 50), (16, 32), (128, 192), (64, 128))
"""For the CPU backend."""


@dataclass(frozen=True)
class MixtureDraw(Draw):
    """n, k: hidden and inner size. kind: the name of the router."""

    experts: int
    kind: str
    router: Router
    routing: str


def mixture_draws(seed: str, ranges: Ranges | None = None) -> Iterator[MixtureDraw]:
    """The mixtures that a seed gives."""
    ranges = ranges or Ranges()
    rng = np.random.default_rng(int(seed, 16))
    for number in range(NUM_DRAWS):
        rows = round(log_uniform(rng, *ranges.rows))
        kind = [*ROUTERS][rng.integers(len(ROUTERS))]
        router = replace(ROUTERS[kind], top_k=int(rng.integers(1, MOST_TOP_K + 1)))
        routing = ROUTINGS[rng.integers(2)]
        n, k, experts = _sizes(rng, ranges, router)
        yield MixtureDraw(
            seed, number, rows, n, k, PLAIN, experts, kind, router, routing
        )


def _sizes(
    rng: np.random.Generator, ranges: Ranges, router: Router
) -> tuple[int, int, int]:
    """Hidden and inner size, and experts of which the router can choose."""
    while True:
        hidden, inner = (
            STEP * round(log_uniform(rng, *limits) / STEP)
            for limits in (ranges.hidden, ranges.inner)
        )
        experts_of_group = round(log_uniform(rng, *ranges.experts)) // router.num_groups
        experts = experts_of_group * router.num_groups
        has_enough = router.topk_group * experts_of_group >= router.top_k
        if has_enough and bytes_of_expert(hidden, inner) * experts <= MOST_BYTES:
            return hidden, inner, experts


def bytes_of_expert(hidden: int, inner: int) -> int:
    return 3 * hidden * inner * 2


def near_ties(router: Router, values: Any) -> Any:
    """Whether rounding may change the experts that tokens choose by their values
    [tokens, experts], of NumPy: a bool for each token."""
    least = NEAR * values.std(axis=1)
    is_near = np.zeros(len(values), bool)
    if router.has_groups:
        groups = values.reshape(len(values), router.num_groups, -1)
        sums = np.sort(groups, axis=2)[:, :, -2:].sum(axis=2)
        is_near = _margins(sums, router.topk_group) < least
        is_out = sums < np.sort(sums, axis=1)[:, -router.topk_group, None]
        values = np.where(is_out[:, :, None], -np.inf, groups).reshape(values.shape)
    return is_near | (_margins(values, router.top_k) < least)


def _margins(values: Any, num_best: int) -> Any:
    """Of each row: between its best values and the next one."""
    if num_best == values.shape[1]:
        return np.full(len(values), np.inf)
    values = np.sort(values, axis=1)
    return values[:, -num_best] - values[:, -num_best - 1]


def operation_for(draw: MixtureDraw, world: World, w_layout: str = "nk") -> SharedMoE:
    return SharedMoE(
        is_scaled=w_layout != "nk",
        mixture=Mixture(draw.experts, draw.router),
        hidden=draw.n,
        inner=draw.k,
        parallel="tensor",
        world=world,
    )


def graph_for(draw: MixtureDraw, world: World, w_layout: str = "nk") -> GraphFunction:
    """Of the program that serves a draw's tokens."""
    dims = {"tokens": draw.rows}
    candidate = next(
        candidate
        for candidate in operation_for(draw, world, w_layout).candidates()
        if candidate.serves(dims)
    )
    options = {**candidate.options, "dtype": draw.variant.dtype}
    return candidate.graph(world.size, **options, w_layout=w_layout)


class RandomMixture(Random, MoEWorkload):
    """The layer `MoE` at a draw's sizes: its program, with the weights as arguments."""

    op = "random_mixture"
    element_bytes = 2
    """Of a weight of an expert."""
    draw_of: MixtureDraw
    protocol = PROTOCOL.format(calls="each call a replayed CUDA graph; inputs and")

    def __init__(self, device: Device, drawn: MixtureDraw):
        router = drawn.router
        sizes = Model(drawn.n, drawn.k, drawn.experts, router.top_k)
        name = f"draw {drawn.number}"
        MoEWorkload.__init__(self, device, name, sizes, drawn.rows, drawn.variant.dtype)
        self.op, self.protocol = type(self).op, type(self).protocol
        self.draw_of, self.router, self.routing = drawn, router, drawn.routing
        self.inputs = self.copies = 1
        if isinstance(device, Gpu):
            unread = (1 - router.top_k / drawn.experts) ** drawn.rows
            of_expert = bytes_of_expert(drawn.n, drawn.k) * self.element_bytes // 2
            of_rows = 2 * drawn.rows * drawn.n * (2 + router.top_k)
            num_bytes = of_expert * drawn.experts * (1 - unread) + of_rows
            self.inputs = min(MOST_TURNS, taking_turns(num_bytes, least=1))
            copies = taking_turns(of_expert * drawn.experts, least=1)
            self.copies = min(self.inputs, copies)

    @staticmethod
    def drawn(op: str, seed: str, ranks: int, *, is_timed: bool) -> list[Any]:
        if is_timed:
            return [*mixture_draws(seed)]
        return [*mixture_draws(seed, SMALL)][:CPU_DRAWS]

    @staticmethod
    def prepare(device: Device, drawn: Sequence[MixtureDraw]) -> None:
        if isinstance(device, Gpu):
            compile_at_once([graph_for(draw, device.world) for draw in drawn])

    def close(self) -> None:
        self.made["ours"].close()

    # ------------------------------------------------------------ inputs and weights

    def tokens(self, rank: int, number: int) -> Any:
        """Without those that almost have a tie."""
        x = super().tokens(rank, number)
        # NOTE: CuPy gathers no bfloat16: take the bits.
        bits, places = x.view(np.uint16), self.device.xp.arange(len(x))
        for attempt in count(1):
            logits = self.logits(bits[places].view(x.dtype))
            values = self.router.values(logits, *self.biases_of_router)
            is_near = near_ties(self.router, values)
            if not is_near.any():
                break
            places = places[self.device.xp.asarray(is_near)]
            redrawn = super().tokens(rank, number + attempt * self.inputs)
            bits[places] = redrawn.view(np.uint16)[places]
        return x

    @cached_property
    def whole(self) -> SparseBlock:
        block = super().whole
        if self.router.has_correction:
            name = f"{self.name} correction"
            shape = (self.model.experts,)
            correction = self.device.random(shape, "float32", name, CORRECTION)
            block = replace(block, correction=correction)
        self.device.release()  # fp32 copies
        return block

    def make_weights(self) -> tuple[Any, ...]:
        correction = self.whole.correction
        return *super().make_weights(), *([] if correction is None else [correction])

    @cached_property
    def biases_of_router(self) -> list[Any]:
        return [*map(self.device.on_host, self.weights[3:])]

    @cached_property
    def turns(self) -> list[tuple[Any, ...]]:
        """The weights, and copies that take turns with them."""
        copies = [tuple(map(copy_of, self.weights)) for _ in range(self.copies - 1)]
        return [self.weights, *copies]

    # --------------------------------------------------------------- calls and rivals

    def make(self, schedule: str, **options: Any) -> SharedMoE:
        return operation_for(self.draw_of, self.world)

    def calls(self, operation: Any, outs: Sequence[Any]) -> list[Call]:
        return self.calls_in_turn(operation, outs, [self.weights])

    def calls_in_turn(
        self, operation: Any, outs: Sequence[Any], turns: Sequence[tuple[Any, ...]]
    ) -> list[Call]:
        """A call for each input, with weights in turn."""
        arguments = zip(self.xs, cycle(turns), outs, strict=False)
        return [partial(operation.call, (x, *w), out) for x, w, out in arguments]

    def timed(self, gpu: Gpu, ours: Any, rivals: Mapping[str, Rival]) -> Calls:
        calls = self.calls_in_turn(ours, self.outs, self.turns)
        own_call = in_turn(self.timed_calls(gpu, calls))
        return {"ours": own_call, **{n: in_turn(r.calls) for n, r in rivals.items()}}

    def rivals(self, gpu: Gpu) -> dict[str, Rival]:
        outs = self.new_outs()
        layers = cycle(_moe_torch.Torch(gpu, self, weights) for weights in self.turns)
        arrays = zip(layers, self.xs, outs, strict=False)
        calls = [
            captured(gpu, partial(layer, gpu.as_torch(x), gpu.as_torch(out)))
            for layer, x, out in arrays
        ]
        return {"baseline": Rival(calls, outs)}

    # ------------------------------------------------------------------- the records

    def durations(self, times: Mapping[str, Sequence[float]]) -> dict[str, Any]:
        limit_ms, _ = self.limits(0.0)
        values = Random.durations(self, times)
        return {**values, **limited(times["ours"], limit_ms)}

    def fields(self) -> dict[str, Any]:
        values = {**Random.fields(self), **MoEWorkload.fields(self)}
        return {**values, "router": self.draw_of.kind}


SUBJECTS = {RandomMixture.op: subject(RandomMixture)}
