"""Jobs of several ranks that a test starts, for ranks that must not end well."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

MPIRUN = Path(__file__).parents[2] / "launch" / "mpirun"


class Job(NamedTuple):
    """How a job ended."""

    code: int
    output: str
    seconds: float


def run_job(source: str, ranks: int = 2) -> Job:
    """Run a Python program on some ranks, to its end."""
    launch = [sys.executable, str(MPIRUN), "-n", str(ranks), "--time-limit", "40"]
    since = time.monotonic()
    done = subprocess.run(
        [*launch, "python", "-c", source],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"LAUNCH_PYTHON": sys.executable},
    )
    return Job(done.returncode, done.stdout, time.monotonic() - since)
