"""vLLM's own decode step, the baseline of `decode`, without a network: the slope
between the times of two lengths of the outputs.

All requests start together. While vLLM reads prompts, those that are ready decode: a
short output is so long that its first requests end after the last one is ready. So a
long output has more steps of all requests, and no others.

.venv/bin/python benchmarks/run.py decode_vllm --model qwen3-30b-a3b --context 512
.venv/bin/python benchmarks/run.py decode_vllm --ranks 4    # tensor-parallel
.venv/bin/python benchmarks/run.py decode_vllm --seeds 1    # of `random_decode`
.venv/bin/python benchmarks/run.py prompt_vllm    # the baseline of `prompt`

vLLM may be installed, or only be on PYTHONPATH."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.decoder_models import FIELDS, MODELS
from benchmarks.device import WARM_UP, driver_version
from benchmarks.harness import REPEATS, Result, Run, Subject, numbers
from benchmarks.subjects.random_decode import draws_of
from benchmarks.workload import DTYPE
from etc_dist.errors import ArgumentError

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "TOKENIZERS_PARALLELISM": "false",
}
"""Unless set: what lets vLLM start without a network, a tokenizer and a compiler, and
keeps it from NVLink multicast."""
ATTENTION, GRAPHS = "FLASH_ATTN", "FULL_AND_PIECEWISE"
SHORT, STEPS, SLOPES = 8, 96, 3
"""Tokens of a short output after all prompts are read, how many a long one has more,
and pairs of both."""
MOST_BATCHED = 16384
"""Tokens of a step of vLLM."""
MOST_CAPTURED = 512
"""Rows of the largest CUDA graph that vLLM has by default."""
MARGIN = 256
"""Positions of a request above the context."""
PROTOCOL = (
    f"LLM.generate of as many tokens as prompts take steps and {SHORT}, and of {STEPS} "
    "more: the slope, so that only steps of all requests count; the middle step is at "
    f"the context; median of {SLOPES} after a warm-up"
)
PROMPT_PROTOCOL = (
    "LLM.generate of one token after one prompt, by the host's clock; median after "
    f"{WARM_UP} warm-ups"
)


def engine_arguments(
    folder: str, rows: Sequence[int], batch: int, contexts: Sequence[int], ranks: int
) -> dict[str, Any]:
    """Those of vllm.LLM: the sizes of the model in `folder`, random weights, CUDA
    graphs of steps with so many rows, up to `batch` requests."""
    graphs: dict[str, Any] = {
        "cudagraph_capture_sizes": [*rows],
        "cudagraph_mode": GRAPHS,
    }
    if ranks > 1:  # that pass is compiled by FlashInfer, and may use multicast
        graphs["pass_config"] = {"fuse_allreduce_rms": False}
    return {
        "tensor_parallel_size": ranks,
        "model": folder,
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "dtype": DTYPE,
        "max_model_len": max(contexts) + MARGIN,
        "max_num_seqs": batch,
        "max_num_batched_tokens": MOST_BATCHED,
        "gpu_memory_utilization": 0.93,
        "enable_prefix_caching": False,
        "disable_log_stats": True,
        "attention_backend": ATTENTION,
        "compilation_config": graphs,
        "seed": 0,
    }


def short_output(lengths: Sequence[int]) -> int:
    """Tokens of a short output of requests of these lengths."""
    return SHORT + -(-sum(lengths) // (MOST_BATCHED - len(lengths)))


def prompt_lengths(lengths: Sequence[int]) -> list[int]:
    """Of prompts whose middle step of those that are timed is at these lengths, or
    after a prompt of one token."""
    before = STEPS // 2 + short_output(lengths)
    return [max(1, length - before) for length in lengths]


def fits(llm: Any, lengths: Sequence[int]) -> bool:
    """Whether vLLM's cache holds all requests at once; otherwise some would wait."""
    cache, output = llm.llm_engine.vllm_config.cache_config, STEPS
    output += short_output(lengths)
    block_counts = [
        -(-(prompt + output) // cache.block_size) for prompt in prompt_lengths(lengths)
    ]
    return bool(sum(block_counts) < cache.num_gpu_blocks)  # one block is never used


def slopes(seconds: Callable[[int], float], short: int) -> list[float]:
    """Sorted milliseconds of a step. seconds(tokens): of outputs of so many tokens."""
    seconds(short)
    pairs = [(seconds(short + STEPS), seconds(short)) for _ in range(SLOPES)]
    return sorted((long - less) / STEPS * 1e3 for long, less in pairs)


class Engine:
    """vLLM with random weights of a model; rows, batch and contexts are those of
    `engine_arguments`."""

    def __init__(
        self, run: Run, rows: Sequence[int], batch: int, contexts: Sequence[int]
    ):
        name, ranks, start = run.options.model, run.options.ranks, time.perf_counter()
        for variable, value in ENVIRONMENT.items():
            os.environ.setdefault(variable, value)
        os.environ["VLLM_PLUGINS"] = ""  # ours would be one
        self._vllm, self._torch = import_module("vllm"), import_module("torch")
        self._vocabulary = MODELS[name].vocabulary
        with tempfile.TemporaryDirectory() as folder:
            fields = {**FIELDS[name], "torch_dtype": DTYPE}
            (Path(folder) / "config.json").write_text(json.dumps(fields))
            arguments = engine_arguments(folder, rows, batch, contexts, ranks)
            self.llm = self._vllm.LLM(**arguments)
        ready = round(time.perf_counter() - start, 1)
        run.say(f"{name}: vLLM ready after {ready} s")
        run.shared |= {**facts(self._vllm, self._torch, ranks), "ready_s": ready}

    def timer(self, lengths: Sequence[int]) -> Callable[[int], float]:
        """seconds(tokens): of outputs of so many tokens, after prompts of lengths."""
        rng = np.random.default_rng(0)
        prompts = [
            {"prompt_token_ids": rng.integers(self._vocabulary, size=n).tolist()}
            for n in lengths
        ]

        def seconds(tokens: int) -> float:
            sampling = self._vllm.SamplingParams(
                max_tokens=tokens, ignore_eos=True, temperature=0, detokenize=False
            )
            self._torch.cuda.synchronize()
            start = time.perf_counter()
            self.llm.generate(prompts, sampling, use_tqdm=False)
            return time.perf_counter() - start

        return seconds


def benchmark(engine: Engine, lengths: Sequence[int]) -> dict[str, Any]:
    """The times of one shape."""
    seconds = engine.timer(prompt_lengths(lengths))
    sorted_ms = slopes(seconds, short_output(lengths))
    return {
        "baseline_ms": round(median(sorted_ms), 5),
        "slopes_ms": tuple(round(ms, 5) for ms in sorted_ms),
    }


def facts(vllm: Any, torch: Any, ranks: int) -> dict[str, Any]:
    """The fields of a record that no shape changes."""
    return {
        "world_size": ranks,
        "device": torch.cuda.get_device_properties(0).name,
        "driver": driver_version(),
        "cuda": torch.version.cuda,
        "backend": "cuda",
        "path": "LLM.generate in one process" + ", a worker a GPU" * (ranks > 1),
        "dtype": DTYPE,
        "engine": f"vLLM {vllm.__version__} {ATTENTION}, CUDA graphs {GRAPHS}",
    }


def measure(run: Run) -> Iterator[Result]:
    shapes = list(shapes_of(run.options))
    batches = sorted({len(lengths) for _, lengths in shapes})
    contexts = [max(lengths) for _, lengths in shapes]
    engine = Engine(run, batches, max(batches), contexts)
    run.shared["protocol"] = PROTOCOL
    for names, lengths in shapes:
        shape = {**names, "batch": len(lengths), "context": max(lengths)}
        if fits(engine.llm, lengths):
            yield {**shape, **benchmark(engine, lengths)}, []
        else:
            run.say(f"{shape} does not fit vLLM's cache: not timed")


def measure_prompts(run: Run) -> Iterator[Result]:
    model, contexts = run.options.model, run.options.context
    rows = [1, *(context for context in contexts if context <= MOST_CAPTURED)]
    engine = Engine(run, rows, 1, contexts)
    run.shared["protocol"] = PROMPT_PROTOCOL
    for context in contexts:
        seconds = engine.timer([context])
        times = [seconds(1) for _ in range(WARM_UP + REPEATS)][WARM_UP:]
        values = {"model": model, "batch": 1, "context": context, "repeats": REPEATS}
        yield {**values, "baseline_ms": round(median(times) * 1e3, 5)}, []


def shapes_of(options: Namespace) -> Iterator[tuple[dict[str, str], Sequence[int]]]:
    """The names of each shape in a record, and the lengths of its requests."""
    if options.seeds:
        for draw in draws_of(options.seeds, options.model):
            yield {"model": draw.name, "seed": draw.seed}, draw.lengths
        return
    for context, batch in product(options.context, options.batches):
        yield {"model": options.model}, [context] * batch


def refusal(options: Namespace) -> str:
    if options.seeds and not list(shapes_of(options)):
        return f"--seeds: no draw has the model {options.model}"
    if not options.seeds and min(options.context) <= (before := STEPS // 2 + SHORT):
        return f"--context: wanted at least {before + 1}"
    return no_vllm(options)


def no_vllm(options: Namespace) -> str:
    if find_spec("vllm") is not None:
        return ""
    error = ArgumentError(
        "vLLM cannot be timed",
        where=sys.executable,
        wanted="the package vllm",
        got="none on its path",
        fix="install vllm 0.24, or add its folder to PYTHONPATH",
    )
    return str(error)


def add_options(parser: ArgumentParser) -> None:
    add_model(parser, "qwen3-30b-a3b")
    add = parser.add_argument
    add("--batches", type=numbers, default=[1, 8, 32, 128])
    add("--seeds", type=numbers, help="in place of both, of random_decode")


def add_model(parser: ArgumentParser, model: str) -> None:
    add = parser.add_argument
    add("--model", choices=MODELS, default=model)
    add("--context", type=numbers, default=[512, 4096], help="one or several")
    add("--ranks", type=int, default=1, help="GPUs that share each model")


SUBJECTS = {
    "decode_vllm": Subject(
        "Time vLLM's own decode step.",
        measure,
        add_options,
        refusal=refusal,
        has_world=False,
    ),
    "prompt_vllm": Subject(
        "Time vLLM's first token of a prompt.",
        measure_prompts,
        partial(add_model, model="qwen3-8b"),
        refusal=no_vllm,
        has_world=False,
    ),
}
