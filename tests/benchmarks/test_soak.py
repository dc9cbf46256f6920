"""The soak runs on the CPU backend, and finds results that differ and memory that
grows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np

from benchmarks import records, soak, soak_cases

ROOT = Path(__file__).parents[2]


def test_soak_of_mixed_calls_is_recorded(tmp_path: Path) -> None:
    launch = [sys.executable, str(ROOT / "launch" / "mpirun"), "-n", "2"]
    command = [str(ROOT / "benchmarks" / "soak.py"), "--cpu", "--calls", "60"]
    done = subprocess.run(
        [*launch, *command, "--record", str(tmp_path / "some.jsonl")],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (record,) = records.load(tmp_path)
    assert isinstance(record, records.SoakRecord)
    assert (record.op, record.world_size, record.ranks_per_gpu) == ("soak", 2, 1)
    assert (record.runs, record.mismatches, record.growth_bytes) == (60, 0, 0)
    assert record.error is not None and record.error < 6e-3


def test_differing_results_and_growth_are_faults() -> None:
    grown = soak.Memory(device=1, host=soak.HOST_TOLERANCE + 1)
    faults = soak.faults_of(soak.Result(1.0, 2, grown))
    assert [fault.split()[0] for fault in faults] == ["2", "the", "a"]
    kept = soak.Memory(device=0, host=soak.HOST_TOLERANCE)
    assert soak.faults_of(soak.Result(1.0, 0, kept)) == []


def test_reference_of_experts_weighs_those_of_the_largest_logits() -> None:
    experts, hidden = soak_cases.EXPERTS, soak_cases.EXPERTS
    x = np.eye(1, hidden, dtype=np.float16) * 20
    router = np.zeros((experts, hidden), np.float16)
    router[5, 0] = 1  # e**20 times as likely as any other
    gate_up = np.ones((experts, 2, hidden), np.float16)
    down = np.arange(experts, dtype=np.float16).reshape(experts, 1, 1)
    y = soak_cases.moe_reference(x, router, gate_up, down.repeat(hidden, 1))
    np.testing.assert_allclose(y, 5 * 20 * 20, rtol=1e-3)
