"""Attention of a decode step alone: its shares and their combination as a decoder has
them, without new keys and values, against FlashAttention-3.

The lengths of requests follow from the commit: uniform in their logarithms. A call
computes LAYERS layers, each with its own cache, of which nothing stays in the L2
cache until the next call; times are of a layer. A layer begins when all of the one
before is complete. Ours normalizes and rotates queries, the rival gets them so.

    launch/mpirun -n 1 benchmarks/run.py attention

FlashAttention-3 is that of vLLM, which may be installed, or only be on PYTHONPATH."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from statistics import median
from typing import Any, cast

import numpy as np

from benchmarks import records
from benchmarks.decoder import PAGE_SIZE, drawn_table
from benchmarks.decoder_models import MODELS, SMALL_MODELS
from benchmarks.decoder_reference import Fp32, cached, rotated
from benchmarks.device import DTYPES, Device, Gpu, captured, wide
from benchmarks.harness import (
    REPEATS,
    SCHEDULES,
    SMALL,
    Result,
    Run,
    Subject,
    add_models,
    numbers,
)
from benchmarks.protocol import compared
from benchmarks.random_sizes import SEEDS, log_uniform, seed_of
from benchmarks.subjects import random_sizes
from benchmarks.workload import (
    REPLAYED,
    TOLERANCE,
    Calls,
    GraphCall,
    Rival,
    Workload,
    limited,
    medians,
)
from etc_dist.functions.append_kv import CHUNK
from etc_dist.functions.push_rows import push_rows
from etc_dist.ir import EventTensor, Graph, graph_function, span
from etc_dist.ir.expr import wrap
from etc_dist.ir.function import TENSOR
from etc_dist.models.decoder_attention import AttentionCalls
from etc_dist.models.experts import Turn
from etc_dist.models.sizes import PLAIN, DecoderSizes
from etc_dist.models.step_policy import StepPolicy, padded
from etc_dist.ops.tuning import PACKAGE, tuning_of

OP = "attention"
ON_GPU = ("qwen3-32b", "qwen3-30b-a3b")
ROWS, LENGTHS, LAYERS = 128, (32, 2048), 16
SMALL_ROWS, SMALL_LENGTHS, SMALL_LAYERS = 6, (4, 150), 3
"""On the CPU backend."""
LEEWAY = 1.5
"""Times TOLERANCE: queries and the weights of softmax are rounded, too."""
RIVAL_PAGES, MOST_SPLITS = (16, 64), 32
"""Of vLLM: its default and our page size, and its default for CUDA graphs."""
CHOICES = {
    name: config
    for name, config in {**MODELS, **SMALL_MODELS}.items()
    if config.features == PLAIN and not config.float8
}
"""The models whose attention has no biases, windows or sinks."""


class _Before:
    """In place of events of new keys and values: the end of the layer before."""

    def __init__(self, attended: EventTensor):
        self._attended = attended

    def __getitem__(self, index: Any) -> Any:
        step, layer, _ = index
        return self._attended[step, layer - 1, 1].when(layer > 0)


class AttentionAlone(AttentionCalls):
    """Attention without new keys and values."""

    def add_layer(self, turn: Turn) -> EventTensor:
        """Returns its events, as `_add_events`."""
        attended = self._add_events()
        self._attend(turn, cast(EventTensor, _Before(attended)), attended)
        self._combine(turn, attended)
        return attended


@graph_function
def attention_graph(g: Graph, *, sizes: DecoderSizes, early: bool = True) -> None:
    """x [rows, (heads + 2 * kv_heads) * head_dim], of which only queries are read, and
    the inputs and dims of a decoder -> y [rows, heads * head_dim] of the last layer."""
    rows, layers = g.dims("rows layers")
    request = g.input("request", (rows,), "int32")
    position = g.input("position", (1, rows), "int32")
    calls = AttentionAlone(g, sizes, (wrap(1), layers), request, position, early)
    x = g.input("x", calls.qkv.shape, sizes.dtype)
    y = g.output("y", calls.y.shape, sizes.dtype)
    ready = g.events("ready", (1,), expects=rows)
    (r,) = grid = g.grid(r=rows)
    g.call(
        push_rows(TENSOR),
        grid,
        name="take_queries",
        reads=[x[span(r, 1), :]],
        writes=[calls.qkv[span(r, 1), :]],
        notifies=[ready[0]],
    )
    calls.plan(wrap(0), ready[0])
    with g.loop(layer=layers) as layer:
        attended = calls.add_layer((wrap(0), layer))
    (r,) = grid = g.grid(r=rows)
    g.call(
        push_rows(TENSOR),
        grid,
        name="give_result",
        reads=[calls.y[span(r, 1), :]],
        writes=[y[span(r, 1), :]],
        waits=[calls.plan_events[0], attended[0, layers - 1, 1]],
    )


class Attention(Workload):
    """Of requests of these lengths, their own positions included."""

    op = OP
    protocol = REPLAYED
    is_replayed = True
    leeway = LEEWAY
    baselines: tuple[str, ...] = ()

    def __init__(
        self, device: Device, name: str, lengths: Sequence[int], seed: str, layers: int
    ):
        self.config = CHOICES[name]
        self.lengths = np.array(lengths, np.int32)
        self.seed, self.layers = seed, layers
        heads, dim = self.config.heads, self.config.head_dim
        sizes = heads * dim, (heads + 2 * self.config.kv_heads) * dim
        super().__init__(device, name, sizes, len(lengths))
        if isinstance(device, Gpu) and find_spec("vllm") is not None:
            self.baselines = tuple(f"pages of {size}" for size in RIVAL_PAGES)

    @property
    def out_shape(self) -> tuple[int, int]:
        return self.m, self.n

    def x(self, rank: int, number: int = 0) -> Any:
        return self.device.random((self.m, self.k), self.dtype, "qkv", 1.0)

    def make_weights(self) -> tuple[Any, ...]:
        return tuple(self.tensors.values())

    @cached_property
    def tensors(self) -> dict[str, Any]:
        """The inputs but x, by name."""
        config, xp = self.config, self.device.xp
        num_own_pages = -(-self.lengths // PAGE_SIZE)
        table, num_pages = drawn_table(num_own_pages), int(num_own_pages.sum())
        of_layer = num_pages, 2, config.kv_heads, PAGE_SIZE, config.head_dim
        cache = self.device.empty((self.layers, *of_layer), self.dtype)
        for layer in range(self.layers):
            drawn = self.device.random(of_layer, self.dtype, f"cache {layer}", 1.0)
            cache.view(np.uint16)[layer] = drawn.view(np.uint16)
        gains = self.device.random((self.layers, config.head_dim), "float32", "gain")
        gains = (1 + gains).astype(DTYPES[self.dtype])
        names = ("q_norm", "k_norm") if config.normalizes_heads else ()
        return {
            "request": xp.arange(self.m, dtype=np.int32),
            "position": xp.asarray(self.lengths[None] - 1),
            "table": xp.asarray(table),
            "cos_sin": xp.asarray(config.cos_sin(table.shape[1] * PAGE_SIZE)),
            **dict.fromkeys(names, gains),
            "cache": cache,
        }

    def make(self, schedule: str, **options: Any) -> GraphCall:
        sizes = self.config.sizes(PAGE_SIZE, self.dtype)
        graph = attention_graph(
            self.world.size, sizes=sizes, early=schedule != "dynamic"
        )
        call = GraphCall(graph, self.world, ("x", *self.tensors, "y"), schedule)
        workers = call.program.workers if isinstance(self.device, Gpu) else None
        policy = StepPolicy(self.config, workers, tuning=tuning_of(self.world))
        dims = policy.dims(padded(self.m), int(self.lengths.max()))
        names = "shares", "shares_of_task", "cuts", "most_blocks"
        call.dims = {name: dims[name] for name in names if name in dims}
        return call

    def arguments(self, number: int) -> tuple[Any, ...]:
        return self.xs[number], *self.weights

    def reference(self, number: int = 0) -> Any:
        """Of the last layer."""
        return self.reference_of(self.layers - 1)

    def rivals(self, gpu: Gpu) -> dict[str, Rival]:
        by_name = dict(zip(self.baselines, RIVAL_PAGES, strict=False))
        return {name: self._flash_attention(gpu, of) for name, of in by_name.items()}

    def parts(self, gpu: Gpu) -> Calls:
        return {}

    def limits(self, gpu_ms: float) -> tuple[float, float]:
        return 0.0, 0.0

    def durations(self, times: Mapping[str, Sequence[float]]) -> dict[str, Any]:
        gpu = cast(Gpu, self.device)
        of_layer = {n: [t / self.layers for t in ts] for n, ts in times.items()}
        config = self.config
        row = 2 * config.kv_heads * config.head_dim * self.tensors["cache"].itemsize
        limit = int(self.lengths.sum()) * row / gpu.rates[0] * 1e3
        values = {**medians(of_layer), **limited(of_layer["ours"], limit)}
        if "baseline" in times:
            speedup = median(times["baseline"]) / median(times["ours"])
            values["speedup"] = round(speedup, 4)
        return values

    def fields(self) -> dict[str, Any]:
        return {
            "batch": self.m,
            "context": int(self.lengths.max()),
            "num_positions": int(self.lengths.sum()),
            "layers": self.layers,
            "seed": self.seed,
        }

    def _queries(self, layer: int) -> Any:
        """Normalized and rotated, [rows, heads, dim] in fp32."""
        config, math, tensors = self.config, Fp32(self.device.xp), self.tensors
        # NOTE: CuPy copies no strided arrays of bfloat16.
        heads = wide(self.xs[0])[:, : self.n].reshape(self.m, config.heads, -1)
        if config.normalizes_heads:
            gain = wide(tensors["q_norm"])[layer]
            heads = math.norm(heads, gain, config.norm_eps)
        cos_sin = tensors["cos_sin"][tensors["position"][0]][:, None]
        return rotated(math, heads, cos_sin)

    def reference_of(self, layer: int) -> Any:
        config, math, of_rows = self.config, Fp32(self.device.xp), []
        table, cache = self.tensors["table"], self.tensors["cache"]
        queries = self._queries(layer).reshape(
            self.m, config.kv_heads, -1, config.head_dim
        )
        for row, length in enumerate(self.lengths.tolist()):
            keys, values = cached(math, cache[layer], table[row : row + 1], length)
            of_rows.append(math.attend(queries[row : row + 1], keys, values))
        return math.xp.concatenate(of_rows).reshape(self.m, self.n)

    def _flash_attention(self, gpu: Gpu, page_size: int) -> Rival:
        """As vLLM calls it: one plan for all layers, an upper bound of splits."""
        flash = import_module("vllm.vllm_flash_attn.flash_attn_interface")
        config, tensors = self.config, self.tensors
        lengths = gpu.as_torch(gpu.xp.asarray(self.lengths))
        first_rows = gpu.as_torch(gpu.xp.arange(self.m + 1, dtype=np.int32))
        shared: dict[str, Any] = {
            "max_seqlen_q": 1,
            "max_seqlen_k": int(self.lengths.max()),
            "cu_seqlens_q": first_rows,
            "causal": True,
            "num_splits": MOST_SPLITS,
        }
        plan = flash.get_scheduler_metadata(
            batch_size=self.m,
            num_heads_q=config.heads,
            num_heads_kv=config.kv_heads,
            headdim=config.head_dim,
            cache_seqlens=lengths,
            qkv_dtype=gpu.torch.bfloat16,
            page_size=page_size,
            window_size=(-1, -1),
            **shared,
        )
        shared |= {
            "seqused_k": lengths,
            "softmax_scale": config.head_dim**-0.5,
            "window_size": [-1, -1],
            "block_table": gpu.as_torch(_table_of(gpu, tensors["table"], page_size)),
            "scheduler_metadata": plan,
            "fa_version": 3,
        }
        layers = []
        for layer in range(self.layers):
            keys, values = _plain_pages(gpu, tensors["cache"][layer], page_size)
            q = self._queries(layer).astype(DTYPES[self.dtype])
            layers.append({"q": gpu.as_torch(q), "k": keys, "v": values})
        out = self.new_outs()[0]
        shared["out"] = gpu.as_torch(out).reshape(layers[0]["q"].shape)

        def attend() -> None:
            for of_layer in layers:
                flash.flash_attn_varlen_func(**of_layer, **shared)

        return Rival([captured(gpu, attend)], [out])


def _table_of(gpu: Gpu, table: Any, page_size: int) -> Any:
    """The table of smaller pages, without negative numbers."""
    count = PAGE_SIZE // page_size
    pages = gpu.xp.maximum(table, 0)[..., None] * np.int32(count)
    return (pages + gpu.xp.arange(count, dtype=np.int32)).reshape(len(table), -1)


def _plain_pages(gpu: Gpu, cache: Any, page_size: int) -> Any:
    """The keys and values of a layer, [2, pages, page_size, kv_heads, head_dim], whose
    chunks are in order."""
    pages, _, heads, size, dim = cache.shape
    chunks = cache.view(np.uint16).reshape(pages, 2, heads, size, dim // CHUNK, CHUNK)
    slots, xp = gpu.xp.arange(size)[:, None], gpu.xp
    order = xp.arange(dim // CHUNK)[None] ^ slots % CHUNK
    plain = chunks[:, :, :, slots, order].reshape(pages, 2, heads, size, dim)
    plain = xp.ascontiguousarray(plain.transpose(1, 0, 3, 2, 4)).view(cache.dtype)
    return gpu.as_torch(plain.reshape(2, -1, page_size, heads, dim))


def lengths_of(seed: str, rows: int, least: int, most: int) -> list[int]:
    """Those that a seed gives."""
    rng = np.random.default_rng(int(seed, 16))
    return [round(log_uniform(rng, least, most)) for _ in range(rows)]


def benchmark(case: Attention, schedule: str, repeats: int) -> Result:
    """The layers but the last one are checked by themselves."""
    out, of_layers, wrong = case.new_outs()[0], ("q_norm", "k_norm", "cache"), []
    with case.make(schedule) as ours:
        for layer in range(case.layers - 1):
            some = {n: slice(layer, layer + 1) for n in of_layers}
            inputs = (a[some.get(n, ...)] for n, a in case.tensors.items())
            ours(case.xs[0], *inputs, out)
            ours.synchronize()
            error = case.device.relative_error([out], [case.reference_of(layer)])
            if not error <= TOLERANCE[case.dtype] * LEEWAY:
                wrong.append(f"error {error:.2e} of layer {layer}")
        of_last, faults = compared(case, cast(Any, ours), repeats)
        values, wrong = dict(of_last), [*wrong, *faults]
    values["baseline"] = engine() if case.baselines else "none, vLLM was not found"
    if case.baselines:
        of_calls = values["baselines_ms"]
        of_layer = {n: round(ms / case.layers, 5) for n, ms in of_calls.items()}
        values["baselines_ms"] = of_layer
    return values, wrong


def engine() -> str:
    return f"FlashAttention-3 of vLLM {import_module('vllm').__version__}"


def measure(run: Run) -> Iterator[Result]:
    device, options = run.device, run.options
    is_on_gpu = isinstance(device, Gpu)
    run.shared["protocol"] = f"{REPLAYED}; a call is {LAYERS} layers"
    rows, layers = (ROWS, LAYERS) if is_on_gpu else (SMALL_ROWS, SMALL_LAYERS)
    bounds = LENGTHS if is_on_gpu else SMALL_LENGTHS
    for turn in options.seeds:
        seed = seed_of(records.commit(), OP, turn)
        lengths = lengths_of(seed, rows, *bounds)
        for name in options.models or (ON_GPU if is_on_gpu else [SMALL]):
            case = Attention(device, name, lengths, seed, layers)
            yield benchmark(case, options.schedule, options.repeats)
            del case  # before the next one is made
            device.release()


def add_options(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add_models(parser, CHOICES)
    add("--seeds", type=numbers, default=[1], help=f"some of {SEEDS}")
    add("--schedule", choices=SCHEDULES, default="static")
    add("--repeats", type=int, default=REPEATS)


SUBJECTS = {
    OP: Subject(
        "Check and time the attention of a decode step alone.",
        measure,
        add_options,
        refusal=random_sizes.refusal,
        settings={"tuning": PACKAGE},
    )
}
