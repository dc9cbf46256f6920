"""Jobs of several ranks that a test starts: ranks that fail, are killed or fork."""

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from launch.command import find_mpirun

MPIRUN = Path(__file__).parents[2] / "launch" / "mpirun"


BEGIN = """
import os, signal, sys, time
from etc_dist.errors import EtcDistError, WorldError
from etc_dist.settings import Settings
from etc_dist.world import start

CPU = Settings(backend="cpu")
tag = ""

def show(*words):
    print(f"{tag}{' '.join(map(str, words))}\\n", end="", flush=True)

def refused(call):
    try:
        call()
    except Exception as error:
        show(f"{type(error).__name__}: {' '.join(str(error).split())}")
"""
"""The begin of all programs."""
TORCH = """
import torch, torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
tag = f"rank {rank}: "
"""
"""The begin of those of torchrun, after `BEGIN`."""


class Job(NamedTuple):
    """The exit code and output of a job."""

    code: int
    output: str


def run_job(source: str, ranks: int = 2, *options: str, **variables: str) -> Job:
    """Run `BEGIN` and a Python program on some ranks, to its end. Ranks that hang, also
    after another one has failed, end it at the time limit with code 124."""
    limits = ["--time-limit", "40", "--grace", "60"]
    launch = [sys.executable, str(MPIRUN), "-n", str(ranks), *limits, *options]
    process = subprocess.run(
        [*launch, "python", "-c", BEGIN + source],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"LAUNCH_PYTHON": sys.executable} | variables,
    )
    return Job(process.returncode, process.stdout)


def run_on_hosts(source: str, ranks: int = 4, hosts: int = 2, **variables: str) -> Job:
    """`run_job` on pretended hosts, on the CPU backend."""
    # NOTE: mpi4py, once imported, starts MPI in this process, or keeps others from it.
    version = subprocess.check_output([find_mpirun(sys.executable), "--version"])
    if b"Open MPI" in version or b"open-mpi" in version:
        pytest.skip("only MPICH starts ranks on pretended hosts")
    variables = {"ETC_DIST_BACKEND": "cpu"} | variables
    return run_job(source, ranks, "--pretend-hosts", str(hosts), **variables)


def run_torch_job(source: str, ranks: int = 2) -> Job:
    """Run `BEGIN`, `TORCH` and a Python program by torchrun, to its end."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--no-python"]
    launch += [f"--nproc-per-node={ranks}", "--standalone"]
    process = subprocess.run(
        [*launch, sys.executable, "-c", BEGIN + TORCH + source],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    return Job(process.returncode, process.stdout)
