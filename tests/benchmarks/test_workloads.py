"""Every workload runs on the CPU backend, finds itself right and writes a record."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import records
from benchmarks.harness import TENSOR_PARALLEL

ROOT = Path(__file__).parents[2]
HIDDEN, INNER = 512, 2048 // TENSOR_PARALLEL


@pytest.mark.parametrize(
    ("op", "n", "k"),
    [
        ("matmul_reduce_scatter", HIDDEN, INNER),
        ("all_gather_matmul", 2 * INNER, HIDDEN),
        ("mlp", HIDDEN, INNER),
    ],
)
def test_workload_is_checked_and_recorded(
    op: str, n: int, k: int, tmp_path: Path
) -> None:
    path = tmp_path / "some.jsonl"
    launch = [sys.executable, str(ROOT / "launch" / "mpirun"), "-n", "2"]
    command = [str(ROOT / "benchmarks" / f"{op}.py"), "--cpu", "--repeats", "1"]
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
    assert 1e-3 < record.error < 4e-3
    assert isinstance(record, records.LayerRecord) == (op == "mlp")
