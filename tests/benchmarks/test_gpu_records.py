"""On a stand-in of a GPU, each benchmark compares with its rivals, and its results are
records of their kinds."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import harness, protocol, run, workload
from benchmarks.device import Device, Gpu, wide
from benchmarks.random_sizes import SIZES, seed_of
from benchmarks.records import Record, read
from benchmarks.subjects import chain, epilogues, matmul, random_sizes
from etc_dist.world import World


class StandIn(Gpu):
    """NumPy arrays; each call takes 1 ms."""

    def __init__(self, world: World):
        Device.__init__(self, world)
        self.xp, self.torch = np, None
        self.machine = {"device": "NVIDIA H200", "driver": "580", "cuda": "13.0"}

    normal, mark, poison_staging = Device.normal, Device.mark, Device.poison_staging
    synchronize, rates = Device.synchronize, (4e12, 7e14)
    release, on_host = Device.release, Device.on_host

    def matmul(self, x: Any, w: Any, out: Any) -> Callable[[], Any]:
        return lambda: out.__setitem__(..., wide(x) @ wide(w).T)

    def swiglu(self, gate_up: Any, out: Any) -> Callable[[], Any]:
        gate, up = np.split(gate_up, 2, axis=1)

        def call() -> None:
            out[...] = wide(gate) / (1 + np.exp(-wide(gate))) * wide(up)

        return call

    compiled_swiglu = swiglu

    def evict(self) -> None:
        pass

    def all_gather(self, source: Any, out: Any) -> Callable[[], Any]:
        return lambda: out.__setitem__(..., source)

    reduce_scatter = all_gather

    def time(self, call: Callable[[], Any]) -> float:
        call()
        return 1.0

    def baseline(self) -> str:
        return "NumPy"

    def libraries(self) -> dict[str, Any]:
        return {"numpy": lambda array: array}


@pytest.fixture
def results(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[[str], list[Record]]:
    """Runs a subject; its records."""
    monkeypatch.setenv("BENCH_COMMIT", "0123abc")
    monkeypatch.setattr(harness, "open_device", StandIn)
    monkeypatch.setattr(protocol, "HOST_CALLS", 1)
    monkeypatch.setattr(protocol, "HOST_ROUNDS", 1)
    monkeypatch.setattr(matmul, "ROTATED_BYTES", 2.0)
    monkeypatch.setattr(epilogues, "SIZES", epilogues.SMALL)
    monkeypatch.setattr(epilogues, "ROWS", epilogues.SMALL_ROWS)
    monkeypatch.setattr(workload, "captured_ours", lambda gpu, call: call)
    for module in (matmul, chain, random_sizes):
        monkeypatch.setattr(module, "captured", lambda gpu, call: call)

    small = {op: sizes.small for op, sizes in random_sizes.SIZES.items()}
    monkeypatch.setattr(random_sizes, "SIZES", small)
    monkeypatch.setattr(random_sizes, "REPEATS", 2)

    def results(command: str) -> list[Record]:
        path = tmp_path / "some.jsonl"
        code = run.main([*command.split(), "--cpu", "--record", str(path)])
        *some, last = read(path)
        assert code == bool(last.failed)
        return [*(r for r in some if r.op != "run"), last]

    return results


@pytest.mark.parametrize(
    ("command", "fields"),
    [
        ("matmul --batch", {"batch_ms": 1.0, "speedup": 1.0, "gemm_ms": 1.0}),
        ("matmul_reduce_scatter", {"baseline_ms": 1.0, "collective_ms": 1.0}),
        ("mlp --batch", {"two_ops_ms": 1.0, "batch_ms": 1.0, "limit_ms": 1.0}),
        ("chain", {"N": 136, "K": 264, "baseline_ms": 1.0}),
    ],
)
def test_rivals_are_checked_and_recorded(
    command: str, fields: dict[str, Any], results: Callable[[str], list[Record]]
) -> None:
    options = "--models small --rows-per-rank 3 --repeats 2"
    result, last = results(f"{command} {options}")
    assert last.failed == []
    errors = {k: v for k, v in vars(result).items() if k.endswith("error") and v}
    assert len(errors) >= 2 and max(errors.values()) < 0.02
    assert {name: result.get(name) for name in fields} == fields
    assert result.commit == "0123abc" and json.dumps(vars(result))


def test_epilogues_are_recorded_beside_the_plain_store(
    results: Callable[[str], list[Record]],
) -> None:
    names = [(r.model, r.of_store, r.store_ms) for r in results("epilogues")[:-1]]
    assert names == [("bias + gelu", 1.0, 1.0), ("fp8, scales", 1.0, 1.0)]


def test_random_sizes_are_recorded_with_the_gates_that_are_not_met(
    results: Callable[[str], list[Record]], capsys: pytest.CaptureFixture[str]
) -> None:
    gated, transposed, last = results("random_matmul --seeds 2 --draws 2 --regret")
    assert (gated.gated, transposed.w_layout) == (True, "kn")
    seed = seed_of("0123abc", "random_matmul", 2)
    for draw_idx, r in enumerate((gated, transposed)):
        assert (r.seed, r.model) == (seed, f"draw {draw_idx}")
        assert r.policy and r.compared > 1 and r.regret == 0 and r.speedup == 1
        assert 0 < r.error < 3e-3 and 0 < r.baseline_error < 6e-3
    assert last.failed == ["M below 32: geometric mean 2 1.000 1.030 no"]
    assert (
        "| M below 32: geometric mean | 2 | 1.000 | 1.030 | no |"
        in capsys.readouterr().out
    )


# Float8 matmuls have one seed, whose sizes a stand-in for a GPU would take minutes for.
HAVE_SEEDS = [op for op in SIZES if not op.startswith("matmul_float8")]


@pytest.mark.parametrize("op", [op for op in HAVE_SEEDS if op != "random_matmul"])
def test_every_random_operation_has_a_rival(
    op: str, results: Callable[[str], list[Record]]
) -> None:
    result, _ = results(f"{op} --seeds 1 --draws 1")
    assert (result.op, result.speedup) == (op, 1.0)
    assert result.seed == seed_of("0123abc", op, 1)
