"""vLLM's own decode step, the baseline of `decode`, without a network: the slope
between outputs of 8 and 104 tokens.

.venv/bin/python benchmarks/run.py decode_vllm --model qwen3-30b-a3b --context 512
.venv/bin/python benchmarks/run.py decode_vllm --ranks 4    # tensor-parallel

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

from benchmarks.decoder import MODELS
from benchmarks.device import driver_version
from benchmarks.harness import Result, Run, Subject, numbers
from benchmarks.workload import DTYPE
from etc_dist.errors import ArgumentError
from etc_dist.functions.scaled_weights import BLOCK
from etc_dist.models.config import ModelConfig
from etc_dist.models.families import MODEL_TYPES
from etc_dist.models.float8 import METHOD, UNCONVERTED
from etc_dist.models.quantized import FIELD

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
"""Tokens of a short output, how many a long one has more, and pairs of both."""
FLOAT8 = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": METHOD,
    "weight_block_size": [BLOCK, BLOCK],
}
"""The quantization_config of a model with float8 weights."""
MARGIN = 256
"""Positions of a request above the context."""
PROTOCOL = (
    f"LLM.generate of {SHORT} and {SHORT + STEPS} tokens: the slope, so that prompts "
    f"cancel; the middle step is at the context; median of {SLOPES} after a warm-up"
)


def hf_config(config: ModelConfig) -> dict[str, Any]:
    """The config.json of a model."""
    fields: dict[str, Any] = {
        "architectures": [config.architecture],
        "model_type": MODEL_TYPES[config.architecture],
        "hidden_size": config.hidden,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocabulary,
        "max_position_embeddings": config.positions,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_base,
        "tie_word_embeddings": config.is_tied,
        "attention_bias": False,
        "hidden_act": "silu",
        "torch_dtype": DTYPE,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
    }
    if config.float8:
        count = 0 if config.mixture is None else config.layers
        routers = [f"model.layers.{n}.mlp.gate" for n in range(count)]
        fields[FIELD] = FLOAT8 | {UNCONVERTED: ["lm_head", *routers]}
    if config.mixture is None:
        return fields | {"intermediate_size": config.inner}
    return fields | {
        "moe_intermediate_size": config.inner,
        "num_experts": config.mixture.experts,
        "num_experts_per_tok": config.mixture.router.top_k,
        "norm_topk_prob": config.mixture.router.normalize,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


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
        "max_num_batched_tokens": 16384,
        "gpu_memory_utilization": 0.93,
        "enable_prefix_caching": False,
        "disable_log_stats": True,
        "attention_backend": ATTENTION,
        "compilation_config": graphs,
        "seed": 0,
    }


def prompt_length(context: int) -> int:
    """Of a prompt whose middle step of those that are timed is at `context`."""
    return context - STEPS // 2 - SHORT


def fits(llm: Any, batch: int, context: int) -> bool:
    """Whether vLLM's cache holds all requests at once; otherwise some would wait."""
    cache = llm.llm_engine.vllm_config.cache_config
    longest = prompt_length(context) + SHORT + STEPS
    num_blocks = batch * -(-longest // cache.block_size)
    return bool(num_blocks < cache.num_gpu_blocks)  # one block is never used


def slopes(seconds: Callable[[int], float]) -> list[float]:
    """Sorted milliseconds of a step. seconds(tokens): of outputs of so many tokens."""
    seconds(SHORT)
    pairs = [(seconds(SHORT + STEPS), seconds(SHORT)) for _ in range(SLOPES)]
    return sorted((long - short) / STEPS * 1e3 for long, short in pairs)


def benchmark(
    vllm: Any, torch: Any, llm: Any, name: str, batch: int, context: int
) -> dict[str, Any]:
    """The times of one shape."""
    drawn = np.random.default_rng(0).integers(
        MODELS[name].vocabulary, size=(batch, prompt_length(context))
    )
    prompts = [{"prompt_token_ids": ids} for ids in drawn.tolist()]

    def seconds(tokens: int) -> float:
        sampling = vllm.SamplingParams(
            max_tokens=tokens, ignore_eos=True, temperature=0, detokenize=False
        )
        torch.cuda.synchronize()
        start = time.perf_counter()
        llm.generate(prompts, sampling, use_tqdm=False)
        return time.perf_counter() - start

    sorted_ms = slopes(seconds)
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
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(hf_config(MODELS[name])))
        llm = vllm.LLM(
            **engine_arguments(folder, options.batches, options.context, options.ranks)
        )
        ready = round(time.perf_counter() - start, 1)
        run.say(f"{name}: vLLM ready after {ready} s")
        run.shared |= {**facts(vllm, torch, options.ranks), "ready_s": ready}
        for context, batch in product(options.context, options.batches):
            shape = {"model": name, "batch": batch, "context": context}
            if fits(llm, batch, context):
                yield {**shape, **benchmark(vllm, torch, llm, name, batch, context)}, []
            else:
                run.say(f"{shape} does not fit vLLM's cache: not timed")


def refusal(options: Namespace) -> str:
    if prompt_length(min(options.context)) < 1:
        return f"--context: wanted at least {1 - prompt_length(0)}"
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
