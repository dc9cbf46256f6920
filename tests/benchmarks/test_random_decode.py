"""Decode steps that follow from the commit, with vLLM's where they were measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import harness, run
from benchmarks.random_sizes import seed_of, summary, tables
from benchmarks.records import append, now, read
from benchmarks.subjects import decode, random_decode
from benchmarks.subjects.random_decode import (
    MOST_BYTES,
    SMALL,
    Choices,
    all_draws,
    decode_draws,
    draws_of,
    num_bytes,
)
from tests.benchmarks.conftest import record
from tests.benchmarks.test_gpu_records import StandIn


def test_steps_are_drawn_within_the_limits(seed: int) -> None:
    texts = [f"{seed % 2**16 + n:08x}" for n in range(30)]
    drawn = [draw for text in texts for draw in decode_draws(text)]
    assert drawn[:8] == [*decode_draws(texts[0])] and len(drawn) == 240
    for draw in drawn:
        assert 1 <= len(draw.lengths) <= 128
        assert 32 <= min(draw.lengths) <= max(draw.lengths) <= 16384
        assert num_bytes(draw.model, draw.lengths) <= MOST_BYTES
    assert {draw.model for draw in drawn} == {
        *("qwen3-8b", "qwen3-14b", "qwen3-32b", "qwen3-30b-a3b")
    }
    few = sum(len(draw.lengths) ** 2 <= 128 for draw in drawn)
    assert 90 < few < 190  # large batches of long requests do not fit


def test_a_model_for_several_gpus_is_drawn_with_as_much_cache(seed: int) -> None:
    choices = Choices(("glm-4.5-air",))
    for draw in decode_draws(f"{seed % 2**16:08x}", choices):
        cache = num_bytes(draw.model, draw.lengths) - num_bytes(draw.model, [])
        assert 0 < cache <= 215e9


def test_only_draws_of_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BENCH_COMMIT", "0123abc")
    some = [draw for draw in all_draws([1, 2]) if draw.model == "qwen3-8b"]
    assert draws_of([1, 2], "qwen3-8b") == some != []
    assert draws_of([1, 2], None) == all_draws([1, 2])
    model_draws = draws_of([1, 2], "llama-3.2-1b")
    assert len(model_draws) == 16 and {d.model for d in model_draws} == {"llama-3.2-1b"}


def test_the_weights_and_pages_of_a_model_are_counted() -> None:
    weights = num_bytes("qwen3-32b", [])
    assert 65e9 < weights < 66e9
    page = 64 * 64 * 2 * 8 * 128 * 2  # layers, positions, K and V, heads, dim, bytes
    assert num_bytes("qwen3-32b", [1, 65]) == weights + 3 * page


def test_drawn_steps_have_gates_if_vllm_was_measured() -> None:
    alone = record("random_decode", of_limit=0.8, seed="0123abcd")
    faster = record("random_decode", of_limit=0.8, seed="0123abcd", speedup=1.1)
    slower = record("random_decode", of_limit=0.8, speedup=0.9)
    assert [row["met"] for row in summary("random_decode", [alone])] == ["-"]
    answers = [row["met"] for row in summary("random_decode", [alone, faster, slower])]
    assert answers == ["no", "no", "-"]
    assert "| limit / ours: geometric mean | 1 | 0.800 | - | - |" in tables([alone])


def test_drawn_steps_are_recorded_beside_those_of_vllm(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("BENCH_COMMIT", "0123abc")
    monkeypatch.setattr(harness, "open_device", StandIn)
    monkeypatch.setattr(random_decode, "Choices", lambda: SMALL)
    monkeypatch.setattr(random_decode, "REPEATS", 2)
    monkeypatch.setattr(random_decode, "compile_programs", lambda device, drawn: None)
    monkeypatch.setattr(decode, "captured_ours", lambda gpu, call: call)
    seed = seed_of("0123abc", "random_decode", 1)
    first, *_ = decode_draws(seed, SMALL)
    of_vllm = {"batch": len(first.lengths), "context": max(first.lengths)}
    of_vllm |= {"model": first.name, "seed": seed, "baseline_ms": 1.5}
    vllm, path = tmp_path / "vllm.jsonl", tmp_path / "some.jsonl"
    r = record("decode_vllm", date=now(), world_size=1, **of_vllm)
    append(vars(r), vllm)
    command = f"random_decode --cpu --seeds 1 --draws 2 --steps 2 --record {path}"
    assert run.main([*command.split(), "--vllm", str(vllm)]) == 0
    _, compared, alone, last = read(path)
    assert (compared.speedup, alone.speedup, last.failed) == (1.5, None, [])
    assert compared.baseline == "vLLM" and compared.seed == alone.seed == seed
    assert alone.baseline == "none, vLLM did not measure this draw"
    assert compared.num_positions == sum(first.lengths)
    assert "| vLLM / ours: least | 1 | 1.500 | 1.000 | yes |" in capsys.readouterr().out
