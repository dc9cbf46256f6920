"""Mixtures of experts and MLPs by float8 weights with a scale for each block of
128 x 128, on one GPU. The baseline is ours by the same weights in 16 bits, which are
rounded to them.

The first mixture is a layer of Qwen3-30B-A3B for one token. The sizes of the others,
and of the MLPs, follow from the commit, with M from 1 to 32. As `random_mixture` and
`random_mlp` otherwise: replayed CUDA graphs, inputs and weights that take turns, and a
gate that is not met is a failure of the run."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np

from benchmarks.device import DTYPES, NUMBERS, Call, Device, Gpu, dequantized, wide
from benchmarks.random_sizes import NAMED_MIXTURE, PLAIN
from benchmarks.subjects.matmul import taking_turns
from benchmarks.subjects.matmul_float8 import scaled_weight
from benchmarks.subjects.moe import MODELS, ROUTINGS, limit_ms
from benchmarks.subjects.random_mixture import (
    SMALL,
    MixtureDraw,
    RandomMixture,
    Ranges,
    graph_for,
    mixture_draws,
    operation_for,
)
from benchmarks.subjects.random_sizes import (
    CPU_DRAWS,
    Choice,
    Random,
    RandomMLP,
    compile_at_once,
    copy_of,
    subject,
)
from benchmarks.workload import Rival
from etc_dist import ScaledWeight
from etc_dist.functions.router import Router
from etc_dist.functions.scaled_weights import PER_BLOCK, Scaling
from etc_dist.layers.mlp import SharedMLP
from etc_dist.layers.moe import SharedMoE
from etc_dist.ops.operation import kept

SCALING = Scaling(PER_BLOCK, "float32")
ROWS = (1, 32)
DEVIATION = float(np.sqrt(np.nanmean(np.square(NUMBERS))))
"""Of codes that are about equally often."""


def layer_weight(device: Device, name: str, shape: Sequence[int]) -> ScaledWeight:
    """One that keeps the deviation of what it multiplies."""
    return scaled_weight(device, name, shape, shape[-1] ** -0.5 / DEVIATION)


def dense(device: Device, w: ScaledWeight, dtype: str) -> Any:
    """A weight, or those of experts, rounded to `dtype`."""
    if len(w.shape) == 2:
        return dequantized(device.xp, *w).astype(DTYPES[dtype])
    # NOTE: the bits, since CuPy assigns no arrays of bfloat16.
    bits = device.xp.empty(w.shape, np.uint16)
    for expert, pair in enumerate(zip(*w, strict=True)):
        rounded = dequantized(device.xp, *pair).astype(DTYPES[dtype])
        bits[expert] = rounded.view(np.uint16)
    return bits.view(DTYPES[dtype])


def copies(weights: Sequence[Any]) -> tuple[Any, ...]:
    """Copies of weights, of which some are scaled."""
    return tuple(
        ScaledWeight(*map(copy_of, w)) if isinstance(w, ScaledWeight) else copy_of(w)
        for w in weights
    )


class OfCodes(Random):
    """A draw's operation by scaled weights; its baseline is ours by 16-bit weights."""

    libraries = "our layer in 16 bits; "
    baseline_leeway = 4.0  # its weights are rounded, too
    num_turns: int
    """Copies of the weights that take turns."""

    @cached_property
    def turns(self) -> list[tuple[Any, ...]]:
        copied_weights = (copies(self.weights) for _ in range(self.num_turns - 1))
        return [self.weights, *copied_weights]

    @cached_property
    def dense_turns(self) -> list[tuple[Any, ...]]:
        """The same in 16 bits."""
        first = tuple(
            dense(self.device, w, self.dtype) if isinstance(w, ScaledWeight) else w
            for w in self.weights
        )
        return [first, *(copies(first) for _ in range(self.num_turns - 1))]

    def fields(self) -> dict[str, Any]:
        return {**super().fields(), "w_layout": SCALING.w_layout}


class MixtureFloat8(OfCodes, RandomMixture):
    """The layer `MoE` at a draw's sizes, with scaled weights of experts."""

    op = "mixture_float8"
    element_bytes = 1

    def __init__(self, device: Device, drawn: MixtureDraw):
        RandomMixture.__init__(self, device, drawn)
        self.num_turns = self.copies
        if drawn.number < 0:
            self.name = NAMED_MIXTURE

    @staticmethod
    def drawn(op: str, seed: str, ranks: int, *, is_timed: bool) -> list[Any]:
        if not is_timed:
            return [*mixture_draws(seed, SMALL)][:CPU_DRAWS]
        hidden, inner, experts, top_k = MODELS[NAMED_MIXTURE]
        layer = MixtureDraw(
            seed,
            number=-1,
            rows=1,
            n=hidden,
            k=inner,
            variant=PLAIN,
            experts=experts,
            kind="softmax",
            router=Router(top_k),
            routing=ROUTINGS[0],
        )
        return [layer, *mixture_draws(seed, Ranges(rows=ROWS))]

    @staticmethod
    def prepare(device: Device, drawn: Sequence[MixtureDraw]) -> None:
        if isinstance(device, Gpu):
            layouts = "nk", SCALING.w_layout
            compile_at_once(
                [graph_for(draw, device.world, n) for draw in drawn for n in layouts]
            )

    def draw_experts(self) -> tuple[Any, Any]:
        hidden, inner, experts, _ = self.model
        shapes = {
            "gate and up": (experts, 2 * inner, hidden),
            "down": (experts, hidden, inner),
        }
        gate_up, down = (
            layer_weight(self.device, f"{self.name} {name}", shape)
            for name, shape in shapes.items()
        )
        return gate_up, down

    def expert_weights(self, expert: int) -> tuple[Any, Any]:
        gate_up, down = (
            dequantized(self.device.xp, w.codes[expert], w.scales[expert])
            for w in (self.whole.gate_up, self.whole.down)
        )
        return gate_up, down

    def make_weights(self) -> tuple[Any, ...]:
        block = self.whole
        correction = [] if block.correction is None else [block.correction]
        return block.router, block.gate_up, block.down, *correction

    def make(self, schedule: str, **options: Any) -> SharedMoE:
        return operation_for(self.draw_of, self.world, SCALING.w_layout)

    def rivals(self, gpu: Gpu) -> dict[str, Rival]:
        operation, outs = operation_for(self.draw_of, self.world), self.new_outs()
        calls = self.calls_in_turn(operation, outs, self.dense_turns)
        return {"baseline": Rival(self.timed_calls(gpu, calls), outs, (operation,))}

    def limits(self, gemm_ms: float) -> tuple[float, float]:
        _, _, num_active = self.loads
        return limit_ms(self.model, self.rows, num_active, self.element_bytes), 0.0


class MLPFloat8(OfCodes, RandomMLP):
    """The MLP at a draw's sizes, with scaled weights."""

    op = "mlp_float8"
    protocol = RandomMLP.protocol

    @cached_property
    def num_turns(self) -> int:  # type: ignore[override]
        is_gpu = isinstance(self.device, Gpu)
        return taking_turns(3 * self.n * self.k) if is_gpu else 1

    def make_weights(self) -> tuple[Any, ...]:
        shapes = {"gate": (self.k, self.n), "up": (self.k, self.n)}
        shapes["down"] = self.n, self.k
        return tuple(
            layer_weight(self.device, f"{self.name} {name}", shape)
            for name, shape in shapes.items()
        )

    def call(self, operation: Any, weights: Sequence[Any], out: Any) -> Call:
        return partial(operation.call, (self.xs[0], *weights), out)

    def reference(self, number: int = 0) -> Any:
        x = wide(self.xs[number])
        gate, up, down = (dequantized(self.device.xp, *w) for w in self.weights)
        rows = x @ gate.T
        return (rows / (1 + self.device.xp.exp(-rows)) * (x @ up.T)) @ down.T

    def rivals(self, gpu: Gpu) -> dict[str, Rival]:
        operation, outs = (
            kept(self.world, SharedMLP, schedule="static"),
            self.new_outs(),
        )
        calls = [self.call(operation, w, outs[0]) for w in self.dense_turns]
        return {"baseline": Rival(self.timed_calls(gpu, calls), outs)}

    def choices(self) -> list[Choice]:
        return []


SUBJECTS = {kind.op: subject(kind) for kind in (MixtureFloat8, MLPFloat8)}
