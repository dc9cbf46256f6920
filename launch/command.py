"""The command line of mpirun: which interpreter, which mpirun, with which flags."""

from __future__ import annotations

import argparse
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PRETENDED_HOST = ROOT / "launch" / "pretended_host"
RANKS_PER_CORE, ALWAYS_ALLOWED = 8, 64
"""The ranks that a host may have: for each core, and in any case."""


def find_python() -> str:
    """The interpreter of the ranks, as a full path: ranks may see another PATH."""
    path = os.environ.get("LAUNCH_PYTHON")
    if path:
        return shutil.which(path) or path
    checkout = ROOT / ".venv" / "bin" / "python"
    is_in_venv = sys.prefix != sys.base_prefix
    return str(checkout) if checkout.exists() and not is_in_venv else sys.executable


def find_mpirun(python: str) -> str:
    path = os.environ.get("LAUNCH_MPIRUN")
    # An MPI wheel in the interpreter's folder comes before the system's MPI: mpi4py
    # loads that wheel's library.
    wheel = shutil.which("mpirun", path=str(Path(python).parent))
    mpirun = path or wheel or shutil.which("mpirun")
    if mpirun is None:
        sys.exit(
            "launch/mpirun: no mpirun in the folder of the interpreter or in PATH\n"
            f"  interpreter: {python}\n"
            "  to do:       pip install mpich, or install the system's MPI"
        )
    return mpirun


def too_many_ranks(options: argparse.Namespace) -> str:
    """The error for more ranks than a host can have, or "". Hosts in the host file
    count as equal to this one."""
    hosts = 1
    if options.hostfile:
        with open(options.hostfile, errors="replace") as file:
            names = {line.partition("#")[0].strip() for line in file}
        hosts = max(1, len(names - {""}))
    cores = os.cpu_count() or 1
    most = max(ALWAYS_ALLOWED, RANKS_PER_CORE * cores)
    on_one = max(options.per_host or 0, math.ceil(options.ranks / hosts))
    if on_one <= most:
        return ""
    return (
        "too many ranks for a host\n"
        f"  where:  -n {options.ranks} on {hosts} host{'s' * (hosts > 1)}\n"
        f"  wanted: at most {most} ranks on a host: {RANKS_PER_CORE} for each of "
        f"{cores} CPU cores, and {ALWAYS_ALLOWED} on any host\n"
        f"  got:    {on_one} ranks\n"
        "  to do:  start fewer ranks, or name more hosts by --hostfile"
    )


def mpirun_command(
    mpirun: str, options: argparse.Namespace, environment: Mapping[str, str]
) -> list[str]:
    """mpirun with the flags that its kind needs, up to the ranks' command.
    `environment`: that of all ranks."""
    version = subprocess.run(
        [mpirun, "--version"], capture_output=True, text=True, check=False
    ).stdout
    is_open_mpi = "Open MPI" in version or "open-mpi" in version
    command = [mpirun, "-n", str(options.ranks)]
    if is_open_mpi and options.pretend_hosts:
        sys.exit(
            "launch/mpirun: hosts are pretended by MPICH only\n"
            f"  where:  --pretend-hosts {options.pretend_hosts}\n"
            "  wanted: the mpirun of MPICH\n"
            f"  got:    {mpirun}, of Open MPI\n"
            "  to do:  pip install mpich, or name its mpirun by LAUNCH_MPIRUN"
        )
    if is_open_mpi:
        command += ["--oversubscribe", "--bind-to", "none"]
        if os.geteuid() == 0:
            command.append("--allow-run-as-root")
        if options.hostfile:
            command += ["--hostfile", options.hostfile]
            for name in forwarded(environment):
                command += ["-x", name]
        if options.per_host:
            command += ["--map-by", f"ppr:{options.per_host}:node"]
    else:
        if options.hostfile:
            command += ["-f", options.hostfile]
        if options.per_host:
            command += ["-ppn", str(options.per_host)]
        if options.pretend_hosts:
            command += ["-launcher", "ssh", "-launcher-exec", str(PRETENDED_HOST)]
            command += ["-hosts", pretended(options.ranks, options.pretend_hosts)]
    return command


def pretended(ranks: int, hosts: int) -> str:
    """The names of hosts, each with its number of ranks, for MPICH."""
    counts = [ranks // hosts + (host_idx < ranks % hosts) for host_idx in range(hosts)]
    return ",".join(f"host-{host_idx}:{count}" for host_idx, count in enumerate(counts))


def forwarded(environment: Mapping[str, str]) -> list[str]:
    """Variables that Open MPI passes to other hosts by name; MPICH passes all."""
    prefixes = ("ETC_DIST_", "LAUNCH_", "CUDA_", "PYTHON", "OMP_", "OPENBLAS_", "MKL_")
    transports = ("NVSHMEM_", "NCCL_", "UCX_", "FI_")
    return sorted(
        name
        for name in environment
        if name.startswith(prefixes + transports) or name in ("PATH", "LD_LIBRARY_PATH")
    )


def rank_command(command: list[str], python: str) -> list[str]:
    """Give Python commands the full path of the interpreter."""
    if command[0] in ("python", "python3"):
        return [python, *command[1:]]
    return [python, *command] if command[0].endswith(".py") else command
