"""A mixture of experts as one program, against torch's grouped products.

launch/mpirun -n 1 benchmarks/moe.py --models qwen3-30b-a3b --tokens 1,128,4096
launch/mpirun -n 1 benchmarks/moe.py --triton    # vLLM's Triton kernel beside
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import cycle, product, starmap
from pathlib import Path
from statistics import mean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.command import begin, numbers, parser_for, provenance, record_all
from benchmarks.device import SWIGLU, Call, Device, Gpu
from benchmarks.harness import (
    BLOCK,
    DTYPE,
    WARM_UP,
    bitwise_equal,
    durations,
    faults,
    host_cost,
    measure,
    relative_norm,
)
from benchmarks.moe_rivals import FusedMoE
from etc_dist.layers.moe import MoE
from etc_dist.runtime.stream import stream_for
from etc_dist.world import World


@dataclass(frozen=True)
class Model:
    """One layer's sizes."""

    hidden: int
    inner: int
    experts: int
    top_k: int


MODELS: Mapping[str, Model] = {
    "qwen3-30b-a3b": Model(2048, 768, 128, 8),
    "mixtral-8x7b": Model(4096, 14336, 8, 2),
}
CPU_MODELS: Mapping[str, Model] = {"small": Model(128, 64, 16, 4)}
TOKENS = (1, 8, 32, 128, 512, 1024, 2048, 4096, 8192)
CPU_TOKENS = (50,)
INPUTS = 3
"""Inputs that take turns, so that few tokens do not find their experts in the L2."""
MEMORY_BYTES_PER_S = 4.3e12
"""What an H200 is taken to read from its memory at best (nominally 4.8 TB/s)."""
FLOP_PER_S = 780e12
"""What its tensor cores are taken to do at best in bfloat16 (nominally 989 TFLOP/s)."""
LEEWAY = 1.25
"""Times TOLERANCE: the error allowed; activations and experts' rows are rounded too."""
BASELINE_LEEWAY = 4.0
"""For the baseline, which adds a token's rows in bfloat16, in any order."""
PROTOCOL = (
    "2 ms device sleep, event, call, event; each call a replayed CUDA graph but for "
    f"*_eager_ms; {INPUTS} inputs take turns; median after {WARM_UP} warm-ups; blocks "
    f"of {BLOCK} take turns"
)


@dataclass(frozen=True)
class Case:
    """A layer's weights and inputs [tokens, hidden], all torch tensors, and outputs."""

    model: Model
    router: Any
    gate_up: Any
    down: Any
    xs: Sequence[Any]
    outs: Sequence[Any]

    @property
    def weights(self) -> tuple[Any, Any, Any]:
        return self.router, self.gate_up, self.down


class Torch:
    """The same layer by torch: each step a kernel or a few.

    Router, softmax, top-k, sort, grouped product, SwiGLU, grouped product, weighted
    index_add. Logits in fp32, as ours, so that both choose the same experts."""

    def __init__(self, torch: Any, device: Device, case: Case):
        self._torch, self._device, self._model = torch, device, case.model
        self._router = case.router.t()
        self._gate_up, self._down = (w.transpose(1, 2) for w in case.weights[1:])
        self._experts = torch.arange(case.model.experts, device=case.router.device)
        self._swiglu: Callable[[Any], Any] = self._plain_swiglu
        if isinstance(device, Gpu):
            # NOTE: one kernel, where torch takes two.
            types = "raw T product, int64 width", "raw T out"
            self._kernel = device.xp.ElementwiseKernel(*types, SWIGLU, "swiglu")
            self._swiglu = self._fused_swiglu

    def __call__(self, x: Any, out: Any) -> None:
        weights, ids = self.choose(x)
        token, order, ends = self.sort(ids)
        product = self.multiply(x[token], ends)
        weight = weights.view(-1)[order].to(product.dtype)
        out.zero_().index_add_(0, token, product.mul_(weight[:, None]))

    def choose(self, x: Any) -> tuple[Any, Any]:
        """Weights and ids [tokens, top_k]."""
        share = self.logits(x).softmax(dim=1)
        weights, ids = share.topk(self._model.top_k, dim=1)
        return weights / weights.sum(dim=1, keepdim=True), ids

    def logits(self, x: Any) -> Any:
        """The router's, in fp32."""
        if isinstance(self._device, Gpu):
            dtype = self._torch.float32
            return self._torch.mm(x, self._router, out_dtype=dtype)
        return x.float() @ self._router.float()

    def sort(self, ids: Any) -> tuple[Any, Any, Any]:
        """Choices by expert: their tokens, their places in ids, the experts' ends."""
        sorted_ids, order = ids.view(-1).sort(stable=True)
        ends = self._torch.searchsorted(
            sorted_ids, self._experts, right=True, out_int32=True
        )
        return order // self._model.top_k, order, ends

    def multiply(self, rows: Any, ends: Any) -> Any:
        active = self._swiglu(self.up(rows, ends))
        return self.below(active, ends)

    def up(self, rows: Any, ends: Any) -> Any:
        return self._torch._grouped_mm(rows, self._gate_up, offs=ends)

    def below(self, active: Any, ends: Any) -> Any:
        return self._torch._grouped_mm(active, self._down, offs=ends)

    def products_alone(self, x: Any) -> Call:
        """Both grouped products, on rows that are sorted already."""
        token, _, ends = self.sort(self.choose(x)[1])
        rows = x[token]
        active = self._swiglu(self.up(rows, ends))

        def call() -> None:
            self.up(rows, ends)
            self.below(active, ends)

        return call

    def _plain_swiglu(self, product: Any) -> Any:
        left, right = product.float().chunk(2, dim=1)
        return (self._torch.nn.functional.silu(left) * right).to(product.dtype)

    def _fused_swiglu(self, product: Any) -> Any:
        active = product.new_empty(product.shape[0], product.shape[1] // 2)
        width, eighths = active.shape[1] // 8, active.numel() // 8
        source, target = map(self._device.from_torch, (product, active))
        self._kernel(source, width, target, size=eighths)
        return active


def make_case(torch: Any, device: Device, model: Model, tokens: int) -> Case:
    """Random weights that keep a deviation of about one; the same for each seed."""
    place = f"cuda:{device.world.device}" if isinstance(device, Gpu) else "cpu"
    generator = torch.Generator(place).manual_seed(tokens)

    def normal(*shape: int, scale: float) -> Any:
        options = {"dtype": torch.bfloat16, "device": place, "generator": generator}
        return torch.randn(shape, **options).mul_(scale)

    hidden, inner, experts = model.hidden, model.inner, model.experts
    router = normal(experts, hidden, scale=hidden**-0.5)
    gate_up = normal(experts, 2 * inner, hidden, scale=hidden**-0.5)
    down = normal(experts, hidden, inner, scale=inner**-0.5)
    xs = [normal(tokens, hidden, scale=1.0) for _ in range(INPUTS)]
    outs = [torch.empty_like(x) for x in xs]
    return Case(model, router, gate_up, down, xs, outs)


def reference(torch: Any, case: Case, x: Any) -> tuple[Any, int]:
    """The result in fp32, and how many experts were chosen by some token."""
    model, rows = case.model, x.float()
    share = (rows @ case.router.float().t()).softmax(dim=1)
    ids = share.sort(dim=1, descending=True, stable=True)[1][:, : model.top_k]
    weights = share.gather(1, ids)
    weights = weights / weights.sum(dim=1, keepdim=True)
    out, active = torch.zeros_like(rows), 0
    for expert in range(model.experts):
        token, choice = (ids == expert).nonzero(as_tuple=True)
        if not len(token):
            continue
        active += 1
        left, right = (rows[token] @ case.gate_up[expert].float().t()).chunk(2, dim=1)
        both = torch.nn.functional.silu(left) * right
        product = both @ case.down[expert].float().t()
        out.index_add_(0, token, product * weights[token, choice, None])
    return out, active


def relative_error(
    world: World, outs: Sequence[Any], references: Sequence[Any]
) -> float:
    """The relative Frobenius norm over all inputs and ranks; NaN if any is."""
    pairs = list(zip(outs, references, strict=True))
    off = sum(float((o.double() - r).square().sum()) for o, r in pairs)
    norm = sum(float(r.double().square().sum()) for _, r in pairs)
    return relative_norm(world, (off, norm))


def all_equal(device: Device, moe: MoE, case: Case) -> bool:
    """Whether three runs on each input give equal bits; leaves the last in the outs."""
    same = [
        bitwise_equal(device, moe, partial(moe, x, out), device.from_torch(out))
        for x, out in zip(case.xs, case.outs, strict=True)
    ]
    return all(same)


def captured_ours(device: Device, moe: MoE, x: Any, out: Any) -> Call:
    """A call of ours, replayed."""
    if not isinstance(device, Gpu):
        return partial(moe, x, out)
    stream = device.xp.cuda.Stream(non_blocking=True)
    device.synchronize()
    with stream:
        stream.begin_capture()
        moe(x, out, stream=stream)
        graph = stream.end_capture()
    device.synchronize()
    launch: Call = graph.launch
    return launch


@dataclass(frozen=True)
class Replay:
    """A CUDA graph, and the call that it is of, in whose memory its kernels work."""

    graph: Any
    call: Call

    def __call__(self) -> None:
        self.graph.replay()


def captured_torch(torch: Any, device: Device, call: Call) -> Call:
    """A call of torch's, replayed."""
    if not isinstance(device, Gpu):
        return call
    stream = torch.cuda.Stream()
    device.synchronize()
    with torch.cuda.stream(stream), as_current(stream):
        for _ in range(WARM_UP):
            call()
    device.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream), as_current(stream):
        call()
    device.synchronize()
    return Replay(graph, call)


def as_current(stream: Any) -> Any:
    """torch's stream as a CuPy stream, which is the current one inside of `with`."""
    return stream_for("cuda", stream, None)


def in_turn(calls: Sequence[Call]) -> Call:
    """One of the calls, the next one each time."""
    turns = cycle(calls)
    return lambda: next(turns)()


def host_costs(device: Device, moe: MoE, case: Case) -> dict[str, float]:
    """`host_cost`, by array library."""
    if not isinstance(device, Gpu):
        return {}
    call = partial(moe, case.xs[0], case.outs[0])
    return {"torch": host_cost(device, moe, call)}


def limit_ms(model: Model, tokens: int, active: float) -> float:
    """The longer of reading the active experts' weights and of the products."""
    weights = 3 * model.hidden * model.inner
    read = active * weights * 2 / MEMORY_BYTES_PER_S
    return 1e3 * max(read, tokens * model.top_k * 2 * weights / FLOP_PER_S)


def checked_beside(
    world: World, rival: FusedMoE, case: Case, references: Sequence[Any]
) -> dict[str, Any]:
    """What a record says of vLLM's layer, but for its time."""
    error = relative_error(world, [rival(x) for x in case.xs], references)
    return {"triton": rival.name(), "triton_error": error}


def calls_of(
    device: Device,
    torch: Any,
    case: Case,
    moe: MoE,
    theirs: Torch,
    outs: Sequence[Any],
    rival: FusedMoE | None,
) -> dict[str, Call]:
    """What is timed, by the name that its time has in the record. The baseline fills
    `outs`."""
    pairs = list(zip(case.xs, case.outs, strict=True))
    steps = [partial(theirs, x, out) for x, out in zip(case.xs, outs, strict=True)]
    alone = [theirs.products_alone(x) for x in case.xs]
    graph = partial(captured_torch, torch, device)
    calls = {
        "ours": in_turn([captured_ours(device, moe, *pair) for pair in pairs]),
        "ours_eager": in_turn([partial(moe, *pair) for pair in pairs]),
        "baseline": in_turn([graph(step) for step in steps]),
        "baseline_eager": in_turn(steps),
        "gemm": in_turn([graph(call) for call in alone]),
    }
    if rival:
        calls["triton"] = in_turn([graph(partial(rival, x)) for x in case.xs])
    return calls


def benchmark(
    device: Device, torch: Any, options: Any, name: str, tokens: int
) -> dict[str, Any]:
    """Check, then time one shape: the part of a record that belongs to the shape."""
    model, world = {**MODELS, **CPU_MODELS}[name], device.world
    case = make_case(torch, device, model, tokens)
    moe = MoE(*case.weights, top_k=model.top_k, world=world, schedule=options.schedule)
    equal = all_equal(device, moe, case)
    expected, active = zip(*(reference(torch, case, x) for x in case.xs), strict=True)
    error = relative_error(world, case.outs, expected)
    theirs = Torch(torch, device, case)
    outs = [torch.empty_like(out) for out in case.outs]
    for x, out in zip(case.xs, outs, strict=True):
        theirs(x, out)
    baseline_error = relative_error(world, outs, expected)
    rival = None
    beside: dict[str, Any] = {}
    if options.triton:
        rival = FusedMoE(theirs.logits, *case.weights[1:], model.top_k)
        beside = checked_beside(world, rival, case, expected)
    del expected
    host_us = host_costs(device, moe, case)
    calls = calls_of(device, torch, case, moe, theirs, outs, rival)
    times = measure(device, calls, options.repeats)
    values = {
        "model": name,
        "M": tokens,
        "N": model.hidden,
        "K": model.inner,
        "dtype": DTYPE,
        "experts": model.experts,
        "top_k": model.top_k,
        "active_experts": round(mean(active), 2),
        "schedule": moe.program.plan.schedule,
        **provenance(moe.program),
        **durations(times, limit_ms(model, tokens, mean(active)), 0.0),
        "collective_ms": 0.0,
        "error": error,
        "baseline_error": baseline_error,
        **beside,
        "bitwise_equal": equal,
        "repeats": options.repeats,
        "host_us": host_us,
    }
    moe.synchronize()
    moe.close()
    return values


def measure_all(
    device: Device,
    options: argparse.Namespace,
    shared: Mapping[str, Any],
    counts: Sequence[int],
    measured: Callable[[str, int], Mapping[str, Any]],
    line: Callable[[Mapping[str, Any]], str],
) -> int:
    """Measure each model with each number of tokens; the exit code of `record_all`."""
    models = options.models or (MODELS if isinstance(device, Gpu) else CPU_MODELS)
    shapes = starmap(measured, product(models, counts))
    allowed = partial(faults, ours=LEEWAY, others=BASELINE_LEEWAY)
    return record_all(device.world, options.record, shared, shapes, allowed, line)


def main() -> int:
    parser = parser_for("a mixture of experts", {**MODELS, **CPU_MODELS}, "moe")
    text = f"numbers of tokens, with commas between; default: {TOKENS}"
    parser.add_argument("--tokens", type=numbers, help=text)
    text = "time vLLM's Triton kernel beside; vLLM must be installed"
    parser.add_argument("--triton", action="store_true", help=text)
    options = parser.parse_args()
    if options.triton and not find_spec("vllm"):
        parser.error("--triton: vLLM is not installed")
    device = begin(options.cpu)
    torch = import_module("torch")
    shared = {
        "op": "moe",
        "protocol": PROTOCOL,
        **device.facts(),
        "baseline": f"torch {torch.__version__}, _grouped_mm and one SwiGLU kernel",
    }
    counts = options.tokens or (TOKENS if isinstance(device, Gpu) else CPU_TOKENS)
    measured = partial(benchmark, device, torch, options)
    return measure_all(device, options, shared, counts, measured, _line)


def _line(values: Mapping[str, Any]) -> str:
    beside = (
        ", {triton}: {triton_ms:.3f} (error {triton_error:.2e})"
        if "triton" in values
        else ""
    )
    return (
        "{model:14s} M {M:5d}, {active_experts:g} experts: ours {ours_ms:.3f} (eager "
        "{ours_eager_ms:.3f}), baseline {baseline_ms:.3f} (eager "
        "{baseline_eager_ms:.3f}), products {gemm_ms:.3f}, limit {limit_ms:.3f} ms; "
        "speed-up {speedup:.2f}, of limit {of_limit:.2f}, error {error:.2e} (baseline "
        "{baseline_error:.2e}), equal bits {bitwise_equal}, host {host_us} us" + beside
    ).format(**values)


if __name__ == "__main__":
    sys.exit(main())
