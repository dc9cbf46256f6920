"""A mixture of experts as one program, against torch's grouped GEMMs and NCCL.

--triton adds vLLM's kernel. Three inputs alternate, so that few tokens do not find
their experts in L2. On several ranks, the baseline is the faster of an all-to-all and
of gathering all tokens."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np

from benchmarks.device import (
    DTYPES,
    FLOP_PER_S,
    MEMORY_BYTES_PER_S,
    WARM_UP,
    Call,
    Device,
    Gpu,
    captured,
    roofline_ms,
    wide,
)
from benchmarks.harness import SMALL, Result, Run, Subject, add_batch, add_shapes
from benchmarks.protocol import measure_shapes
from benchmarks.records import FEW
from benchmarks.subjects import _moe_torch
from benchmarks.workload import (
    BLOCK,
    DTYPE,
    LINK_BYTES_PER_S,
    PROTOCOL,
    Calls,
    Rival,
    Shapes,
    Workload,
    in_turn,
)
from etc_dist.functions.router import Router
from etc_dist.layers.moe import MoE
from etc_dist.layers.moe_graph import PARALLEL
from etc_dist.layers.sparse_block import SparseBlock
from etc_dist.ops.operation import Operation


class Model(NamedTuple):
    """One layer's sizes."""

    hidden: int
    inner: int
    experts: int
    top_k: int


MODELS: Mapping[str, Model] = {
    "qwen3-30b-a3b": Model(2048, 768, 128, 8),
    "mixtral-8x7b": Model(4096, 14336, 8, 2),
}
OTHERS: Mapping[str, Model] = {
    "olmoe-1b-7b": Model(2048, 1024, 64, 8),
    "deepseek-v2-lite": Model(2048, 1408, 64, 6),
}
"""Measured only with `--experts`."""
SMALL_MODEL, SMALL_TOKENS = Model(128, 64, 16, 4), 16
TOKENS = (1, 8, 32, 128, 512, 1024, 2048, 4096, 8192)
TOKENS_PER_RANK = (128, 512, 2048, 8192)
INPUTS = 3
"""Inputs used in turn, so that few tokens do not find their experts in L2."""
REPLAYED = (
    "2 ms device sleep, event, call, event; each call a replayed CUDA graph except "
    f"*_eager_ms; {INPUTS} inputs take turns; median after {WARM_UP} warm-ups; blocks "
    f"of {BLOCK} take turns"
)
BASELINES = {"tensor": ("reduce_scatter",), "expert": ("all_to_all", "gathered")}
"""On several ranks, named by their collectives."""
ROUTINGS = ("uniform", "zipf", "one set", "half")
FAR = 64.0
"""A logit that no token exceeds."""


class MoEWorkload(Workload):
    """x [M, H] -> [M, H] on one rank. On several, x has all ranks' tokens if the layer
    is tensor-parallel, a rank's own if it is expert-parallel, and the result has a
    rank's own."""

    libraries = "torch._grouped_mm and one SwiGLU kernel; "
    inputs = INPUTS
    leeway, baseline_leeway = 1.25, 4.0
    """Activations and experts' rows are rounded too; the baselines add a token's rows
    in bfloat16, in any order."""

    def __init__(
        self,
        device: Device,
        name: str,
        sizes: Any,
        rows: int,
        dtype: str = DTYPE,
        parallel: str = "tensor",
        routing: str = "uniform",
        triton: bool = False,
    ):
        super().__init__(device, name, sizes, rows, dtype)
        self.model, self.parallel, self.routing = Model(*sizes), parallel, routing
        self.router = Router(self.model.top_k)
        self.triton = triton
        self.is_replayed = self.world.size == 1
        self.op = "moe" if self.is_replayed else f"moe_{parallel}_parallel"
        if self.is_replayed:
            self.protocol = REPLAYED
        else:
            self.protocol = f"{PROTOCOL}; {INPUTS} inputs take turns; fastest baseline"
            self.baselines = BASELINES[parallel]
        self.facts: dict[str, Any] = {}

    # ------------------------------------------------------------ inputs and weights

    def x(self, rank: int, number: int = 0) -> Any:
        if self.parallel == "expert":
            return self.tokens(rank, number)
        ranks = range(self.world.size)
        bits = [self.tokens(r, number).view(np.uint16) for r in ranks]
        return self.device.xp.concatenate(bits).view(DTYPES[self.dtype])

    def tokens(self, rank: int, number: int) -> Any:
        """A rank's own tokens. One column is 1: the router's adds the bias."""
        name = f"{self.name} x {number} of rank {rank}"
        shape = self.rows, self.model.hidden
        x = self.device.random(shape, "float32", name, 1.0)
        x[:, : self.biases] = 0
        x[:, min(number, self.biases - 1)] = 1
        return x.astype(DTYPES[self.dtype])

    @property
    def biases(self) -> int:
        """With few experts each input has others, so that none are in L2."""
        return self.inputs if self.routing.endswith(FEW) else 1

    @cached_property
    def whole(self) -> SparseBlock:
        """The weights of all ranks, scaled to keep the deviation of x."""
        hidden, experts = self.model.hidden, self.model.experts
        router = self.draw_weight("router", (experts, hidden))
        for n in range(self.biases):
            bias = routing_bias(self.routing, self.model, experts + n)
            router[:, n] = self.device.xp.asarray(bias).astype(router.dtype)
        return SparseBlock(router, *self.draw_experts(), self.router)

    def draw_weight(self, name: str, shape: Sequence[int]) -> Any:
        """One that keeps the deviation of what it multiplies."""
        name, deviation = f"{self.name} {name}", shape[-1] ** -0.5
        return self.device.random(tuple(shape), self.dtype, name, deviation)

    def draw_experts(self) -> tuple[Any, Any]:
        """gate_up and down of all experts."""
        hidden, inner, experts, _ = self.model
        gate_up = self.draw_weight("gate and up", (experts, 2 * inner, hidden))
        return gate_up, self.draw_weight("down", (experts, hidden, inner))

    def expert_weights(self, expert: int) -> tuple[Any, Any]:
        """gate_up and down of an expert in fp32."""
        return wide(self.whole.gate_up[expert]), wide(self.whole.down[expert])

    def make_weights(self) -> tuple[Any, ...]:
        block = self.whole
        # NOTE: CuPy cannot copy strided arrays of bfloat16: copy the bits.
        router, gate_up, down = (
            array.view(np.uint16) for array in (block.router, block.gate_up, block.down)
        )
        share = SparseBlock(router, gate_up, down, block.choice).share(
            self.parallel, self.world.rank, self.world.size
        )
        arrays = (share.router, share.gate_up, share.down)
        return tuple(array.view(DTYPES[self.dtype]) for array in arrays)

    @property
    def out_shape(self) -> tuple[int, int]:
        return self.rows, self.model.hidden

    def make(self, schedule: str, **options: Any) -> Operation:
        return MoE(
            *self.weights,
            top_k=self.model.top_k,
            parallel=self.parallel,
            world=self.world,
            schedule=schedule,
            **options,
        )

    # ----------------------------------------------------------------- the reference

    def choose(self, x: Any) -> tuple[Any, Any]:
        """The experts of each token, and its weight for every expert, 0 for others."""
        logits = self.logits(x)
        ids, weights = self.router.choose(logits, *self.biases_of_router)
        weight = np.zeros(logits.shape, np.float32)
        np.put_along_axis(weight, ids, weights.astype(np.float32), axis=1)
        return ids, self.device.xp.asarray(weight)

    def logits(self, x: Any) -> Any:
        """The router's in fp64, on the host."""
        x, router = (wide(array).astype(np.float64) for array in (x, self.weights[0]))
        return self.device.on_host(x @ router.T)

    @cached_property
    def biases_of_router(self) -> list[Any]:
        """On the host."""
        return []

    def reference(self, number: int = 0) -> Any:
        xp, inner = self.device.xp, self.model.inner
        first = self.world.rank * self.rows if self.parallel == "tensor" else 0
        x = self.xs[number][first : first + self.rows]
        rows, (_, weight) = wide(x), self.choose(x)
        total = xp.zeros(x.shape, np.float32)
        for expert in range(self.model.experts):
            token = xp.flatnonzero(weight[:, expert])
            if not token.size:
                continue
            gate_up, down = self.expert_weights(expert)
            gate_and_up = rows[token] @ gate_up.T
            gate, up = gate_and_up[:, :inner], gate_and_up[:, inner:]
            result = (gate / (1 + xp.exp(-gate)) * up) @ down.T
            total[token] += weight[token, expert][:, None] * result
        return total

    # ------------------------------------------------------------------- the records

    def fields(self) -> dict[str, Any]:
        return {
            "M": len(self.xs[0]),
            "N": self.model.hidden,
            "K": int(self.weights[2].shape[2]),
            "experts": self.model.experts,
            "top_k": self.model.top_k,
            "active_experts": round(self.loads[2], 2),
            "routing": self.routing,
            **self.facts,
        }

    def limits(self, gemm_ms: float) -> tuple[float, float]:
        busy, moved, _ = self.loads
        return busy, 1e3 * moved * self.model.hidden * 2 / LINK_BYTES_PER_S

    @cached_property
    def loads(self) -> tuple[float, float, float]:
        """Means over the inputs: milliseconds of the busiest rank's GEMMs or reads of
        weights, tokens on its links, and experts with at least one token."""
        size, loads = self.world.size, []
        for number in range(self.inputs):
            every = [self.choose(self.tokens(r, number))[0] for r in range(size)]
            ids = np.concatenate(every)
            active = np.unique(ids)
            if self.parallel == "tensor":
                busy = limit_ms(self.model, len(ids), len(active)) / size
                moved = len(ids) * (size - 1) / size
            else:
                busy, moved = self._busiest(ids, active)
            loads.append((busy, moved, float(len(active))))
        busy, moved, num_used = np.mean(loads, axis=0)
        return float(busy), float(moved), float(num_used)

    def _busiest(self, ids: Any, active: Any) -> tuple[float, float]:
        """The longest time of a rank's experts, and the most tokens on a rank's
        links: each token once to each rank with its experts, and one sum back."""
        size, num_own = self.world.size, self.model.experts // self.world.size
        owner_ranks = ids // num_own
        rows = np.bincount(owner_ranks.ravel(), minlength=size)
        reads = np.bincount(active // num_own, minlength=size)
        top_k = self.model.top_k
        pairs = zip(rows.tolist(), reads.tolist(), strict=True)
        busy = max(limit_ms(self.model, n / top_k, e) for n, e in pairs)
        goes = np.zeros((len(ids), size), bool)
        np.put_along_axis(goes, owner_ranks, True, axis=1)
        by_rank = goes.reshape(size, -1, size).sum(axis=1)
        np.fill_diagonal(by_rank, 0)
        return busy, float((by_rank.sum(axis=0) + by_rank.sum(axis=1)).max())

    # ------------------------------------------------------------------ on GPUs alone

    def rivals(self, gpu: Gpu) -> dict[str, Rival]:
        self._xs = [gpu.as_torch(x) for x in self.xs]
        self._layers = {n: _moe_torch.LAYERS[n](gpu, self) for n in self.baselines}
        rivals = {}
        for name, layer in self._layers.items():
            outs = self.new_outs()
            pairs = zip(self._xs, map(gpu.as_torch, outs), strict=True)
            self._eager = [partial(layer, *pair) for pair in pairs]
            rivals[name] = Rival(self._replayed(gpu, self._eager), outs)
        if self.triton:
            fused = _moe_torch.FusedMoE(self._layers["baseline"], self.model.top_k)
            self.facts["triton"] = fused.name()
            outs = [gpu.from_torch(fused(x)) for x in self._xs]
            calls = [partial(fused, x) for x in self._xs]
            rivals["triton"] = Rival(self._replayed(gpu, calls), outs)
        return rivals

    def parts(self, gpu: Gpu) -> Calls:
        alone = [self._layers[self.baselines[0]].alone(x) for x in self._xs]
        names = ("gemm",) if self.is_replayed else ("gemm", "collective")
        calls_by_name = zip(names, zip(*alone, strict=True), strict=True)
        return {
            name: in_turn(self._replayed(gpu, calls)) for name, calls in calls_by_name
        }

    def timed(self, gpu: Gpu, ours: Operation, rivals: Mapping[str, Rival]) -> Calls:
        calls = super().timed(gpu, ours, rivals)
        if not self.is_replayed:
            return calls
        eager = in_turn(self.calls(ours, self.outs))
        return {**calls, "ours_eager": eager, "baseline_eager": in_turn(self._eager)}

    def _replayed(self, gpu: Gpu, calls: Sequence[Call]) -> list[Call]:
        """torch's calls as they are timed."""
        return [captured(gpu, c) for c in calls] if self.is_replayed else [*calls]


def routing_bias(routing: str, model: Model, seed: int) -> Any:
    """The logits that a routing adds to every token's, by expert. "zipf" chooses the
    e-th of the experts, in random order, about in proportion to 1 / e; "one set" the
    same experts for all tokens, "half" none of half of them, "N experts" only N."""
    order = np.random.default_rng(seed).permutation(model.experts)
    bias = np.zeros(model.experts, np.float32)
    if routing == "zipf":
        bias[order] = -np.log(np.arange(1, model.experts + 1))
    elif routing == "one set":
        bias[order[: model.top_k]] = FAR
    elif routing == "half":
        bias[order[: model.experts // 2]] = -FAR
    elif routing.endswith(FEW):
        bias[order[int(routing.removesuffix(FEW)) :]] = -FAR
    return bias


def limit_ms(
    model: Model, tokens: float, active: float, element_bytes: int = 2
) -> float:
    """The longer time: reading the active experts' weights, or the GEMMs."""
    weights = 3 * model.hidden * model.inner
    num_bytes, flops = active * weights * element_bytes, tokens * model.top_k * 2
    rates = MEMORY_BYTES_PER_S, FLOP_PER_S
    return roofline_ms(num_bytes, flops * weights, rates)


def add_options(parser: ArgumentParser) -> None:
    add_shapes(parser, {**MODELS, **OTHERS})
    add = parser.add_argument
    add("--parallel", choices=PARALLEL, default="expert", help="on several ranks")
    add("--routing", choices=ROUTINGS[:2], default="uniform")
    add("--experts", type=int, help="of which all tokens choose, with --models")
    add("--triton", action="store_true", help="time vLLM's Triton kernel, on one rank")
    add_batch(parser)


def refusal(options: Namespace) -> str:
    """What is wrong with the options; "" for nothing."""
    few = options.experts
    if options.triton and not find_spec("vllm"):
        return "--triton: vLLM is not installed"
    if few is not None and not options.models:
        return "--experts: name the models with --models"
    if few is not None and options.routing != ROUTINGS[0]:
        return "--experts and --routing exclude each other"
    for name in options.models or ():
        sizes = {**MODELS, **OTHERS, SMALL: SMALL_MODEL}[name]
        if few is None and name in OTHERS:
            return f"{name} is measured with --experts only"
        if few is not None and not sizes.top_k <= few < sizes.experts:
            return f"--experts: {sizes.top_k} to {sizes.experts - 1} of {name}"
    return ""


def measure(run: Run) -> Iterator[Result]:
    options, size = run.options, run.device.world.size

    def make(device: Device, name: str, sizes: Any, rows: int) -> MoEWorkload:
        few = options.experts
        routing = options.routing if few is None else f"{few}{FEW}"
        triton = options.triton and size == 1
        return MoEWorkload(
            device,
            name,
            sizes,
            rows,
            DTYPE,
            "tensor" if size == 1 else options.parallel,
            routing,
            triton,
        )

    shapes = Shapes(
        models={**MODELS, **OTHERS} if options.models else MODELS,
        small=(SMALL_MODEL, SMALL_TOKENS),
        rows=TOKENS if size == 1 else TOKENS_PER_RANK,
    )
    return measure_shapes(run, make, shapes)


TITLE = "Check and time a mixture of experts."
SUBJECTS = {"moe": Subject(TITLE, measure, add_options, refusal=refusal)}
