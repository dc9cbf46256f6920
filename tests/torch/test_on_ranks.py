"""The operations, modules, example and page on two ranks of torchrun. One job runs all
checks of on_ranks.py, since starting torch takes seconds."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.torch

FILE = Path(__file__).with_name("on_ranks.py")
ROOT = FILE.parents[2]
CHECKS = re.findall(r"^def (check_\w+)\(", FILE.read_text(), re.M)
RANKS = 2


def torchrun(file: Path) -> subprocess.CompletedProcess[str]:
    """Run a program on ranks of the CPU backend."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    environment = {"OMP_NUM_THREADS": "1", "ETC_DIST_BACKEND": "cpu"}
    return subprocess.run(
        [*command, f"--nproc-per-node={RANKS}", file],
        env=os.environ | environment | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=110,
    )


@pytest.fixture(scope="module")
def output() -> str:
    return torchrun(FILE).stdout


@pytest.mark.parametrize("check", CHECKS)
def test_on_two_ranks(check, output):
    for rank in range(RANKS):
        assert f"rank {rank}: {check} passed" in output, output


def test_example_passes():
    process = torchrun(ROOT / "examples" / "torch_tensor_parallel.py")
    assert process.returncode == 0, process.stdout
    assert process.stdout.splitlines()[-1] == "passed"
    assert "2 ranks, cpu, gloo" in process.stdout


def test_listings_of_the_page_run(tmp_path):
    page = (ROOT / "docs" / "torch.md").read_text()
    listings = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    file = tmp_path / "listings.py"
    file.write_text("\n".join(listings))
    assert len(listings) == 4
    process = torchrun(file)
    assert process.returncode == 0, process.stdout
