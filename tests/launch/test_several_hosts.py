"""Jobs on several hosts: what the scheduler's tools and Open MPI's mpirun are given.

Commands of the tests stand for those of a cluster."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

LAUNCH = Path(__file__).parents[2] / "launch"
SRUN = """
while [ "$1" != --input ]; do [ "$1" = --nodelist ] && hosts=$2; shift; done
shift 2
node=0
for host in $(echo "$hosts" | tr , ' '); do
  ETC_DIST_HOST=$host SLURM_NODEID=$node "$@" &
  node=$((node + 1))
done
wait
"""
"""Starts the command on each node, as Slurm's does with one task on each."""


def write_commands(folder: Path, **texts: str) -> None:
    for name, text in texts.items():
        file = folder / name.replace("_", "-")
        file.write_text(f"#!/bin/sh\n{text}\n")
        file.chmod(0o755)


@pytest.mark.parametrize("nodes", [1, 2])
def test_slurm_job_has_a_rank_for_each_gpu_of_each_node(nodes, tmp_path):
    write_commands(
        tmp_path,
        scontrol="printf 'node-0\\nnode-1\\n'",
        nvidia_smi="printf 'GPU 0: H200\\nGPU 1: H200\\n'",
        srun=SRUN,
    )
    variables = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "LAUNCH_PYTHON": sys.executable,
        **({"ETC_DIST_HOST": "node-0"} if nodes == 1 else {}),
        "SLURM_SUBMIT_DIR": str(LAUNCH.parent),
        "SLURM_JOB_NUM_NODES": str(nodes),
        "SLURM_JOB_NODELIST": "node-[0-1]",
    }
    command = ["bash", str(LAUNCH / "slurm.sbatch"), "sh", "-c"]
    process = subprocess.run(
        [*command, "echo $PMI_RANK of $PMI_SIZE on $ETC_DIST_HOST"],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=40,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    assert sorted(process.stdout.splitlines()) == [
        f"[rank {rank}] {rank} of {2 * nodes} on node-{rank // 2}"
        for rank in range(2 * nodes)
    ]


def test_open_mpi_places_ranks_by_host_and_passes_the_environment(tmp_path):
    command = 'printf "%s\\n" "$@" > "$0.given"'
    write_commands(tmp_path, mpirun=f"echo Open MPI 5.0.11\n{command}")
    hosts = tmp_path / "hosts"
    hosts.write_text("host-0\nhost-1\n")
    options = ["-n", "4", "--per-host", "2", "--hostfile", str(hosts), "--share-gpu"]
    variables = {"LAUNCH_MPIRUN": str(tmp_path / "mpirun"), "UCX_TLS": "rc"}
    subprocess.run(
        [sys.executable, str(LAUNCH / "mpirun"), *options, "true"],
        env=os.environ | variables | {"NVSHMEM_HCA_LIST": "mlx5_0"},
        timeout=40,
    )
    text = (tmp_path / "mpirun.given").read_text()
    assert f"--hostfile\n{hosts}\n" in text and "--map-by\nppr:2:node\n" in text
    for name in ("ETC_DIST_SHARE_GPU", "LAUNCH_RANKS", "OMP_NUM_THREADS", "UCX_TLS"):
        assert f"-x\n{name}\n" in text
    assert "-x\nNVSHMEM_HCA_LIST\n" in text


MPIRUN = f"""#!{sys.executable}
import os, subprocess, sys
if "--version" in sys.argv:
    sys.exit()
[guard] = [n for n, text in enumerate(sys.argv) if text.endswith("guard.py")]
for rank, address in enumerate([sys.argv[guard + 1], "/no/socket"]):
    command = [*sys.argv[guard - 1 : guard + 1], address, *sys.argv[guard + 2 :]]
    code = subprocess.call(command, env=os.environ | {{"PMI_RANK": str(rank)}})
sys.exit(code)
"""
"""Starts rank 0 here, and rank 1 as on another host, whose exit code it returns."""


@pytest.mark.parametrize(
    ("command", "code", "text"),
    [
        ("exit 0", 0, ""),
        ("exit $PMI_RANK", 1, ""),
        ("[ $PMI_RANK = 1 ] || kill -9 $PPID", 1, "rank 0 ended without an exit code"),
    ],
)
def test_ranks_of_other_hosts_need_not_report(command, code, text, tmp_path):
    mpirun, hosts = tmp_path / "mpirun", tmp_path / "hosts"
    mpirun.write_text(MPIRUN)
    mpirun.chmod(0o755)
    hosts.write_text("host-0\nhost-1\n")
    options = ["-n", "2", "--hostfile", str(hosts), "--grace", "0"]
    process = subprocess.run(
        [sys.executable, str(LAUNCH / "mpirun"), *options, "sh", "-c", command],
        env=os.environ | {"LAUNCH_MPIRUN": str(mpirun)},
        capture_output=True,
        text=True,
        timeout=40,
    )
    assert process.returncode == code
    assert text in process.stderr and bool(text) == bool(process.stderr)
