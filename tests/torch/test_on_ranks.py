"""The operations and modules on two ranks of torchrun. One job runs all checks of
on_ranks.py, since starting torch takes seconds."""

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


@pytest.fixture(scope="module")
def output() -> str:
    command = [sys.executable, "-m", "torch.distributed.run"]
    done = subprocess.run(
        [*command, f"--nproc-per-node={RANKS}", "--rdzv-backend=c10d", FILE],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=110,
    )
    return done.stdout


@pytest.mark.parametrize("check", CHECKS)
def test_on_two_ranks(check, output):
    for rank in range(RANKS):
        assert f"rank {rank}: {check} passed" in output, output
