"""The markers of tests: what is left out or skipped, and what is refused."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def outcome(tmp_path):
    """What pytest prints about one test with a marker, where there are some GPUs."""

    def run(marker: str, gpus: int) -> str:
        shutil.copy(ROOT / "tests" / "conftest.py", tmp_path)
        test = f"import pytest\n@pytest.mark.{marker}\ndef test(): pass\n"
        (tmp_path / "test_marked.py").write_text(test)
        smi = tmp_path / "nvidia-smi"
        smi.write_text(f"#!/bin/sh\nfor i in $(seq {gpus}); do echo GPU $i; done\n")
        smi.chmod(0o755)
        environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
        for name in ("CUDA_VISIBLE_DEVICES", "ETC_DIST_BACKEND", "LAUNCH_OUTCOMES"):
            environment.pop(name, None)
        command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml")]
        return subprocess.run(
            [*command, "-p", "no:cacheprovider", str(tmp_path)],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ).stdout

    return run


@pytest.mark.parametrize(
    ("marker", "gpus", "words"),
    [
        ("gpu", 0, "left out, for there is no GPU here: 1 tests"),
        ("gpu", 1, "1 passed"),
        ("gpu(devices=2)", 0, "left out, for there is no GPU here: 1 tests"),
        ("gpu(devices=2)", 1, "needs 2 GPUs, and 1 can be used"),
        ("gpu(devices=2)", 2, "1 passed"),
        ("gpu(device=2)", 2, "the gpu marker takes devices= only, not device"),
        ("gpu(2)", 2, "the gpu marker takes devices= only, not 2"),
        ("mpi(size=2)", 0, "the mpi marker takes min_size= only, not size"),
    ],
)
def test_a_marked_test_runs_where_it_can(marker, gpus, words, outcome):
    assert words in outcome(marker, gpus)
