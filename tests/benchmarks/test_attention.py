"""The benchmark of attention alone against a stand-in for FlashAttention-3."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks import harness, run, workload
from benchmarks.device import wide
from benchmarks.records import Record, read
from benchmarks.subjects import attention
from tests.benchmarks.test_gpu_records import StandIn as PlainStandIn

VLLM = "vllm.vllm_flash_attn.flash_attn_interface"


class StandIn(PlainStandIn):
    def __init__(self, world: Any):
        super().__init__(world)
        self.torch = SimpleNamespace(bfloat16="bfloat16")

    def as_torch(self, array: Any) -> Any:
        return array


def flash_attention(
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    seqused_k: Any,
    block_table: Any,
    softmax_scale: float,
    fa_version: int,
    **options: Any,
) -> None:
    assert fa_version == 3 and options["scheduler_metadata"] == "a plan"
    heads, kv_heads = q.shape[1], k.shape[2]
    for row, count in enumerate(seqused_k):
        keys, values = (
            wide(pages[block_table[row]]).reshape(-1, kv_heads, q.shape[2])[:count]
            for pages in (k, v)
        )
        for head in range(heads):
            of = head // (heads // kv_heads)
            weights = np.exp(keys[:, of] @ wide(q[row, head]) * softmax_scale)
            out[row, head] = weights @ values[:, of] / weights.sum()


def recorded(monkeypatch: pytest.MonkeyPatch, folder: Path) -> list[Record]:
    """The records of a run with the stand-in."""
    vllm, flash = ModuleType("vllm"), ModuleType(VLLM)
    vllm.__spec__, vllm.__version__ = ModuleSpec("vllm", None), "0.24.0"
    flash.get_scheduler_metadata = lambda **options: "a plan"
    flash.flash_attn_varlen_func = flash_attention
    modules = {"vllm": vllm, "vllm.vllm_flash_attn": ModuleType("some"), VLLM: flash}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setenv("BENCH_COMMIT", "0123abc")
    monkeypatch.setattr(harness, "open_device", StandIn)
    monkeypatch.setattr(workload, "captured_ours", lambda gpu, call: call)
    monkeypatch.setattr(attention, "captured", lambda gpu, call: call)
    for name in ("ROWS", "LENGTHS", "LAYERS"):
        monkeypatch.setattr(attention, name, getattr(attention, f"SMALL_{name}"))
    path = folder / "some.jsonl"
    command = f"attention --cpu --models small --repeats 2 --record {path}"
    run.main(command.split())
    return [*read(path)]


def test_attention_is_compared_with_pages_of_both_sizes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _, r, last = recorded(monkeypatch, tmp_path)
    assert last.failed == []
    assert r.baselines_ms == {"pages of 16": 0.33333, "pages of 64": 0.33333}
    assert (r.ours_ms, r.baseline_ms, r.speedup) == (0.33333, 0.33333, 1.0)
    assert r.baseline == "FlashAttention-3 of vLLM 0.24.0"
    assert 0 < r.error < 4.5e-3 and 0 < r.baseline_error < 6e-3
    lengths = attention.lengths_of(r.seed, 6, 4, 150)
    assert (r.context, r.num_positions) == (max(lengths), sum(lengths))
    row = 2 * 12 * 64 * 2  # keys and values, KV heads, dim, bytes
    assert r.limit_ms == round(sum(lengths) * row / 4e12 * 1e3, 5)


def test_a_wrong_layer_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    reference = attention.Attention.reference_of

    def changed(case: attention.Attention, layer: int) -> Any:
        return reference(case, layer) * (0.9 if layer == 1 else 1)

    monkeypatch.setattr(attention.Attention, "reference_of", changed)
    _, last = recorded(monkeypatch, tmp_path)
    (fault,) = last.failed
    assert "of layer 1" in fault
