"""vLLM's own decode step, the baseline of `decode`, without a network: the slope
between the times of two lengths of the outputs.

All requests start together. While vLLM reads prompts, those that are ready decode: a
short output is so long that its first requests end after the last one is ready. So a
long output has more steps of all requests, and no others.

.venv/bin/python benchmarks/run.py decode_vllm --model qwen3-30b-a3b --context 512
.venv/bin/python benchmarks/run.py decode_vllm --ranks 4    # tensor-parallel
.venv/bin/python benchmarks/run.py decode_vllm --seeds 1    # of `random_decode`

vLLM may be installed, or only be on PYTHONPATH."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.decoder_models import FIELDS, MODELS
from benchmarks.device import driver_version
from benchmarks.harness import Result, Run, Subject, numbers
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
MARGIN = 256
"""Positions of a request above the context."""
PROTOCOL = (
    f"LLM.generate of as many tokens as prompts take steps and {SHORT}, and of {STEPS} "
    "more: the slope, so that only steps of all requests count; the middle step is at "
    f"the context; median of {SLOPES} after a warm-up"
)


def engine_arguments(
    folder: str, batches: Sequence[int], contexts: Sequence[int], ranks: int
) -> dict[str, Any]:
    """Those of vllm.LLM: the sizes of the model in `folder`, random weights, a CUDA
    graph of each batch."""
    graphs: dict[str, Any] = {
        "cudagraph_capture_sizes": [*batches],
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
        "max_num_seqs": max(batches),
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


def benchmark(
    vllm: Any, torch: Any, llm: Any, name: str, lengths: Sequence[int]
) -> dict[str, Any]:
    """The times of one shape."""
    rng, vocabulary = np.random.default_rng(0), MODELS[name].vocabulary
    prompts = [
        {"prompt_token_ids": rng.integers(vocabulary, size=n).tolist()}
        for n in prompt_lengths(lengths)
    ]

    def seconds(tokens: int) -> float:
        sampling = vllm.SamplingParams(
            max_tokens=tokens, ignore_eos=True, temperature=0, detokenize=False
        )
        torch.cuda.synchronize()
        start = time.perf_counter()
        llm.generate(prompts, sampling, use_tqdm=False)
        return time.perf_counter() - start

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
        "protocol": PROTOCOL,
    }


def measure(run: Run) -> Iterator[Result]:
    options, name, start = run.options, run.options.model, time.perf_counter()
    for variable, value in ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    os.environ["VLLM_PLUGINS"] = ""  # ours would be one
    vllm, torch = import_module("vllm"), import_module("torch")
    fields = {**FIELDS[name], "torch_dtype": DTYPE}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(fields))
        shapes = list(shapes_of(options))
        batches = sorted({len(lengths) for _, lengths in shapes})
        contexts = [max(lengths) for _, lengths in shapes]
        llm = vllm.LLM(**engine_arguments(folder, batches, contexts, options.ranks))
        ready = round(time.perf_counter() - start, 1)
        run.say(f"{name}: vLLM ready after {ready} s")
        run.shared |= {**facts(vllm, torch, options.ranks), "ready_s": ready}
        for names, lengths in shapes:
            shape = {**names, "batch": len(lengths), "context": max(lengths)}
            if fits(llm, lengths):
                yield {**shape, **benchmark(vllm, torch, llm, name, lengths)}, []
            else:
                run.say(f"{shape} does not fit vLLM's cache: not timed")


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
    add = parser.add_argument
    add("--model", choices=MODELS, default="qwen3-30b-a3b")
    add("--batches", type=numbers, default=[1, 8, 32, 128])
    add("--context", type=numbers, default=[512, 4096], help="one or several")
    add("--seeds", type=numbers, help="in place of both, of random_decode")
    add("--ranks", type=int, default=1, help="GPUs that share each model")


SUBJECTS = {
    "decode_vllm": Subject(
        "Time vLLM's own decode step.",
        measure,
        add_options,
        refusal=refusal,
        has_world=False,
    )
}
