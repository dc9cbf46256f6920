"""The command line of mpirun: which interpreter, which mpirun, with which flags."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def find_python() -> str:
    """The interpreter of the ranks, as a full path: ranks may see another PATH."""
    named = os.environ.get("LAUNCH_PYTHON")
    if named:
        return shutil.which(named) or named
    checkout = ROOT / ".venv" / "bin" / "python"
    in_venv = sys.prefix != sys.base_prefix
    return str(checkout) if checkout.exists() and not in_venv else sys.executable


def find_mpirun(python: str) -> str:
    named = os.environ.get("LAUNCH_MPIRUN")
    # An MPI wheel lies beside its interpreter, and must win over the system's:
    # the interpreter's mpi4py loads that wheel's library.
    beside = shutil.which("mpirun", path=str(Path(python).parent))
    found = named or beside or shutil.which("mpirun")
    if found is None:
        sys.exit(
            "launch/mpirun: no mpirun was found beside the interpreter or in PATH\n"
            f"  interpreter: {python}\n"
            "  to do:       pip install mpich, or install the system's MPI"
        )
    return found


def mpirun_command(mpirun: str, options: argparse.Namespace) -> list[str]:
    """mpirun with the flags that its kind needs, up to the ranks' command."""
    version = subprocess.run(
        [mpirun, "--version"], capture_output=True, text=True, check=False
    ).stdout
    open_mpi = "Open MPI" in version or "open-mpi" in version
    command = [mpirun, "-n", str(options.ranks)]
    if open_mpi:
        command += ["--oversubscribe", "--bind-to", "none"]
        if os.geteuid() == 0:
            command.append("--allow-run-as-root")
        if options.hostfile:
            command += ["--hostfile", options.hostfile]
            command += [part for name in forwarded() for part in ("-x", name)]
        if options.per_host:
            command += ["--map-by", f"ppr:{options.per_host}:node"]
    else:
        if options.hostfile:
            command += ["-f", options.hostfile]
        if options.per_host:
            command += ["-ppn", str(options.per_host)]
    return command


def forwarded() -> list[str]:
    """Variables that Open MPI must be told to take to other hosts."""
    prefixes = ("ETC_DIST_", "LAUNCH_", "NVSHMEM_", "NCCL_", "CUDA_", "PYTHON")
    return sorted(
        name
        for name in os.environ
        if name.startswith(prefixes) or name in ("PATH", "LD_LIBRARY_PATH")
    )


def rank_command(command: list[str], python: str) -> list[str]:
    """Give Python commands the full path of the interpreter."""
    if command[0] in ("python", "python3"):
        return [python, *command[1:]]
    return [python, *command] if command[0].endswith(".py") else command
