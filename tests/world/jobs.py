"""Jobs of several ranks that a test starts: ranks that fail, are killed or fork."""

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

MPIRUN = Path(__file__).parents[2] / "launch" / "mpirun"


class Job(NamedTuple):
    """The exit code and output of a job."""

    code: int
    output: str


def run_job(source: str, ranks: int = 2) -> Job:
    """Run a Python program on some ranks, to its end. Ranks that hang, also after
    another one has failed, end it at the time limit with code 124."""
    limits = ["--time-limit", "40", "--grace", "60"]
    launch = [sys.executable, str(MPIRUN), "-n", str(ranks), *limits]
    done = subprocess.run(
        [*launch, "python", "-c", source],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"LAUNCH_PYTHON": sys.executable},
    )
    return Job(done.returncode, done.stdout)
