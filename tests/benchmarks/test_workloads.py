"""Every workload runs on the CPU backend, finds itself right and writes a record."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks import moe, records
from benchmarks.harness import TENSOR_PARALLEL

ROOT = Path(__file__).parents[2]
HIDDEN, INNER = 512, 2048 // TENSOR_PARALLEL

LAYERS = """
from torch import einsum
from torch.nn.functional import silu

def fused_topk(x, logits, top_k, renormalize):
    weights, ids = logits.softmax(1).topk(top_k, 1)
    return weights / weights.sum(1, keepdim=True), ids, None

def fused_experts(x, gate_up, down, weights, ids):
    left, right = einsum("tw,eiw->tei", x.float(), gate_up.float()).chunk(2, 2)
    rows = einsum("tei,ewi->tew", silu(left) * right, down.float())
    chosen = rows.gather(1, ids[:, :, None].expand(-1, -1, rows.shape[2]))
    return (chosen * weights[:, :, None]).sum(1).to(x.dtype)
"""
"""What stands for vLLM's layers, in torch."""
TILES = """
def get_moe_configs(experts, inner, dtype):
    return {1: {}}

def get_config_file_name(experts, inner, dtype):
    return f"E={experts},N={inner}.json"
"""


@pytest.mark.parametrize(
    ("op", "n", "k", "schedule"),
    [
        ("matmul_reduce_scatter", HIDDEN, INNER, None),
        ("all_gather_matmul", 2 * INNER, HIDDEN, None),
        ("mlp", HIDDEN, INNER, None),
        ("mlp", HIDDEN, INNER, "dynamic"),
    ],
)
def test_workload_is_checked_and_recorded(
    op: str, n: int, k: int, schedule: str | None, tmp_path: Path
) -> None:
    path = tmp_path / "some.jsonl"
    launch = [sys.executable, str(ROOT / "launch" / "mpirun"), "-n", "2"]
    command = [str(ROOT / "benchmarks" / f"{op}.py"), "--cpu", "--repeats", "1"]
    command += ["--schedule", schedule] if schedule else []
    done = subprocess.run(
        [*launch, *command, "--record", str(path)],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (record,) = records.load(tmp_path)
    assert isinstance(record, records.FusedRecord)
    assert (record.op, record.world_size, record.M) == (op, 2, 128)
    assert (record.N, record.K, record.bitwise_equal) == (n, k, True)
    assert record.schedule == (schedule or "static")
    assert 1e-3 < record.error < 4e-3
    assert isinstance(record, records.LayerRecord) == (op == "mlp")


def test_triton_kernel_is_refused_without_vllm(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["moe.py", "--cpu", "--triton"])
    monkeypatch.setattr(moe, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        moe.main()
    assert "--triton: vLLM is not installed" in capsys.readouterr().err


# NOTE: not a skip, for the suite refuses tests that are skipped in every run.
if find_spec("torch"):

    def test_mixture_of_experts_is_checked_and_recorded(tmp_path: Path) -> None:
        launch = [sys.executable, str(ROOT / "launch" / "mpirun"), "-n", "1"]
        command = [str(ROOT / "benchmarks" / "moe.py"), "--cpu", "--repeats", "1"]
        record_to = ["--record", str(tmp_path / "some.jsonl")]
        done = subprocess.run(
            [*launch, *command, *record_to, "--tokens", "1,50"],
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        one, many = records.load(tmp_path)
        assert isinstance(one, records.MoERecord)
        assert isinstance(many, records.MoERecord)
        assert (one.M, one.active_experts, many.M) == (1, one.top_k, 50)
        assert many.bitwise_equal
        assert 1e-3 < many.error < 4e-3

    def test_triton_kernel_is_checked_and_recorded_beside(tmp_path: Path) -> None:
        layers = tmp_path / "vllm" / "model_executor" / "layers" / "fused_moe"
        layers.mkdir(parents=True)
        (layers / "__init__.py").write_text(LAYERS)
        (layers / "fused_moe.py").write_text(TILES)
        for package in ("vllm", "triton"):
            (tmp_path / package).mkdir(exist_ok=True)
            (tmp_path / package / "__init__.py").write_text("__version__ = '1.2.3'")
        launch = [sys.executable, str(ROOT / "launch" / "mpirun"), "-n", "1"]
        command = [str(ROOT / "benchmarks" / "moe.py"), "--cpu", "--repeats", "1"]
        record_to = ["--record", str(tmp_path / "some.jsonl")]
        done = subprocess.run(
            [*launch, *command, "--triton", *record_to],
            capture_output=True,
            text=True,
            timeout=100,
            env=os.environ | {"PYTHONPATH": str(tmp_path)},
        )
        assert done.returncode == 0, done.stdout + done.stderr
        (record,) = records.load(tmp_path)
        assert isinstance(record, records.MoERecord)
        named = "vLLM 1.2.3 fused_experts, Triton 1.2.3, tuned tiles E=16,N=64.json"
        assert record.triton == named
        assert record.triton_ms and record.triton_error
        assert record.triton_ms > 0 and 1e-3 < record.triton_error < 4e-3

    @pytest.mark.parametrize(
        ("parallel", "routing", "rows"),
        [("tensor", "uniform", 32), ("expert", "zipf", 16)],
    )
    def test_mixture_of_experts_over_ranks_is_checked_and_recorded(
        parallel: str, routing: str, rows: int, tmp_path: Path
    ) -> None:
        launch = [sys.executable, str(ROOT / "launch" / "mpirun"), "-n", "2"]
        command = [str(ROOT / "benchmarks" / "moe_parallel.py"), "--cpu"]
        command += ["--parallel", parallel, "--routing", routing, "--repeats", "1"]
        done = subprocess.run(
            [*launch, *command, "--record", str(tmp_path / "some.jsonl")],
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        (record,) = records.load(tmp_path)
        assert isinstance(record, records.MoEParallelRecord)
        assert (record.op, record.M) == (f"moe_{parallel}_parallel", rows)
        assert (record.routing, record.bitwise_equal) == (routing, True)
        assert min(record.baselines_ms.values()) == record.baseline_ms
        assert 1e-3 < record.error < 4e-3
