"""The first token of a prompt is checked, and recorded beside vLLM's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks import harness, run
from benchmarks.decoder_reference import Fp32
from benchmarks.records import Record, append, now, read
from benchmarks.subjects import prompt
from etc_dist.models.config import ModelConfig
from tests.benchmarks.conftest import record
from tests.benchmarks.test_gpu_records import StandIn


def recorded(monkeypatch: pytest.MonkeyPatch, folder: Path) -> list[Record]:
    """The records of a run after vLLM's."""
    monkeypatch.setenv("BENCH_COMMIT", "0123abc")
    monkeypatch.setattr(harness, "open_device", StandIn)
    monkeypatch.setattr(prompt, "WARM_UP", 1)
    of_vllm = {"model": "small", "batch": 1, "context": 24, "baseline_ms": 1.5}
    r = record("prompt_vllm", date=now(), world_size=1, seed=None, **of_vllm)
    vllm, path = folder / "vllm.jsonl", folder / "some.jsonl"
    append(vars(r), vllm)
    options = f"--models small --context 24 --repeats 2 --vllm {vllm}"
    run.main([*f"prompt --cpu {options} --record {path}".split()])
    return [*read(path)]


def test_the_first_token_is_recorded_beside_that_of_vllm(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _, r, last = recorded(monkeypatch, tmp_path)
    assert last.failed == [] and 0 < r.error < 0.016 and r.bitwise_equal
    assert r.ours_ms > 0 and r.repeats == 2 and r.checked_layers == 2
    assert (r.baseline_ms, r.speedup) == (1.5, round(1.5 / r.ours_ms, 4))


def test_wrong_logits_and_ids_are_failures(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    reference = prompt.prompt_logits

    def negated(
        math: Fp32, config: ModelConfig, arrays: Mapping[str, Any]
    ) -> tuple[Any, float]:
        expected, below = reference(math, config, arrays)
        return -expected, below

    monkeypatch.setattr(prompt, "prompt_logits", negated)
    _, last = recorded(monkeypatch, tmp_path)
    assert ["error 2.00e+00" in fault for fault in last.failed] == [True, False]
    assert "id_gap" in last.failed[1]
