"""vLLM's decode step is timed as the slope between two lengths of the output."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from benchmarks import run as script
from benchmarks.decoder_models import MODELS
from benchmarks.device import WARM_UP
from benchmarks.harness import REPEATS
from benchmarks.records import load
from benchmarks.subjects import decode_vllm, random_decode
from benchmarks.subjects.random_decode import DecodeDraw
from etc_dist.models.config import parse_config

START_S, PROMPT_S, ROW_S = 50.0, 0.5, 0.001


class StandIn(ModuleType):
    """vLLM whose clock advances by fixed times; it counts calls. Of its cache, blocks
    of 16 positions, 80 are free."""

    __version__ = "0.24.0"

    def __init__(self) -> None:
        super().__init__("vllm")
        self.__spec__ = ModuleSpec("vllm", None)
        self.now = 100.0
        self.tokens: list[tuple[int, int, int]] = []
        """Requests, tokens of a prompt and of an output, of each call."""
        self.SamplingParams = SimpleNamespace
        cache = SimpleNamespace(block_size=16, num_gpu_blocks=81)
        config = SimpleNamespace(cache_config=cache)
        self.llm_engine = SimpleNamespace(vllm_config=config)

    def LLM(self, model: str, **arguments: Any) -> StandIn:
        path = Path(model) / "config.json"
        self.config = parse_config(json.loads(path.read_text()), path)
        self.arguments = arguments
        self.now += START_S
        return self

    def generate(self, prompts: list[Any], sampling: Any, use_tqdm: bool) -> None:
        lengths = {len(prompt["prompt_token_ids"]) for prompt in prompts}
        self.tokens.append((len(prompts), *lengths, sampling.max_tokens))
        self.now += PROMPT_S + ROW_S * len(prompts) * sampling.max_tokens


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    stand_in, torch = StandIn(), ModuleType("torch")
    properties = SimpleNamespace(name="NVIDIA H200")
    torch.cuda = SimpleNamespace(
        synchronize=lambda: None, get_device_properties=lambda _: properties
    )
    torch.version = SimpleNamespace(cuda="13.0")
    monkeypatch.setitem(sys.modules, "vllm", stand_in)
    monkeypatch.setitem(sys.modules, "torch", torch)
    clock = SimpleNamespace(perf_counter=lambda: stand_in.now)
    monkeypatch.setattr(decode_vllm, "time", clock)
    monkeypatch.setenv("BENCH_COMMIT", "some")
    for name in (*decode_vllm.ENVIRONMENT, "VLLM_PLUGINS"):
        monkeypatch.setenv(name, "0")  # restored afterwards
    return stand_in


@pytest.mark.parametrize(
    ("model", "ranks"),
    [("qwen3-30b-a3b", 1), ("qwen3-32b", 2), ("qwen3-30b-a3b-fp8", 1)]
    + [(name, 1) for name in ("llama-3.2-1b", "qwen2.5-32b", "gpt-oss-20b")]
    + [("glm-4.5-air", 4)],
)
def test_slope_of_each_shape_that_fits_is_recorded(
    model: str,
    ranks: int,
    vllm: StandIn,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("VLLM_ALLREDUCE_USE_SYMM_MEM")
    where = "--record", str(tmp_path / "some.jsonl")
    options = "--batches", "1,2", "--context", "512,1024", "--ranks", str(ranks)
    assert script.main(["decode_vllm", "--model", model, *options, *where]) == 0
    assert replace(vllm.config, stop_tokens=()) == MODELS[model]
    arguments = vllm.arguments
    assert (arguments["max_model_len"], arguments["tensor_parallel_size"]) == (
        1280,
        ranks,
    )
    graphs = arguments["compilation_config"]
    assert graphs["cudagraph_capture_sizes"] == [1, 2]
    multicast = {"fuse_allreduce_rms": False} if ranks > 1 else None
    assert graphs.get("pass_config") == multicast
    assert os.environ["VLLM_ALLREDUCE_USE_SYMM_MEM"] == "0"
    assert os.environ["VLLM_PLUGINS"] == ""
    outputs = [9, 105, 9, 105, 9, 105, 9]  # one step reads the prompts
    fitting = [(1, 455), (2, 455), (1, 967)]
    assert vllm.tokens == [(*shape, n) for shape in fitting for n in outputs]
    assert "'batch': 2, 'context': 1024} does not fit" in capsys.readouterr().out
    records = [r for r in load(tmp_path) if r.op == "decode_vllm"]
    assert [(r.batch, r.context) for r in records] == [(1, 512), (2, 512), (1, 1024)]
    assert [r.baseline_ms for r in records] == [1.0, 2.0, 1.0]
    engine = "vLLM 0.24.0 FLASH_ATTN, CUDA graphs FULL_AND_PIECEWISE"
    shared = {(r.model, r.device, r.ready_s, r.engine, r.world_size) for r in records}
    assert shared == {(model, "NVIDIA H200", START_S, engine, ranks)}


def test_slopes_of_drawn_lengths_have_the_names_of_the_draws(
    vllm: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draws = [
        DecodeDraw("0123abcd", 0, "qwen3-8b", [90, 600]),
        DecodeDraw("0123abcd", 1, "qwen3-32b", [90]),
    ]
    monkeypatch.setattr(random_decode, "all_draws", lambda turns, _: draws)
    where = "--record", str(tmp_path / "some.jsonl")
    assert (
        script.main(["decode_vllm", "--model", "qwen3-8b", "--seeds", "1", *where]) == 0
    )
    (r,) = (r for r in load(tmp_path) if r.op == "decode_vllm")
    assert (r.model, r.seed) == ("draw 0, qwen3-8b", "0123abcd")
    assert (r.batch, r.context, r.baseline_ms) == (2, 600, 2.0)
    assert vllm.tokens[0] == (2, 33, 543, 9)


def test_the_first_token_of_each_prompt_is_recorded(
    vllm: StandIn, tmp_path: Path
) -> None:
    where = "--record", str(tmp_path / "some.jsonl")
    assert script.main(["prompt_vllm", "--context", "512,4096", *where]) == 0
    graphs = vllm.arguments["compilation_config"]
    assert graphs["cudagraph_capture_sizes"] == [1, 512]
    arguments = vllm.arguments
    assert (arguments["max_num_seqs"], arguments["max_model_len"]) == (1, 4352)
    count = WARM_UP + REPEATS
    assert vllm.tokens == [(1, 512, 1)] * count + [(1, 4096, 1)] * count
    records = [r for r in load(tmp_path) if r.op == "prompt_vllm"]
    milliseconds = (PROMPT_S + ROW_S) * 1e3
    assert [(r.model, r.context, r.baseline_ms) for r in records] == [
        ("qwen3-8b", 512, milliseconds),
        ("qwen3-8b", 4096, milliseconds),
    ]


def test_a_short_output_ends_after_all_prompts_are_read() -> None:
    lengths = [16384] * 32
    prompts = decode_vllm.prompt_lengths(lengths)
    num_steps = -(-sum(prompts) // (16384 - 32))
    assert decode_vllm.short_output(lengths) >= num_steps + 8
    assert prompts[0] + decode_vllm.short_output(lengths) + 48 == 16384
    assert decode_vllm.prompt_lengths([32, 16384])[0] == 1


def test_missing_vllm_and_a_short_context_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    for options, text in (((), "the package vllm"), (("--context", "56"), "least 57")):
        with pytest.raises(SystemExit):
            script.main(["decode_vllm", *options])
        assert text in capsys.readouterr().err
