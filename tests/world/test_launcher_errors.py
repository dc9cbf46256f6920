"""Ranks that MPI does not connect, and processes that ranks have started."""

import os
import socket
import sys

import pytest

from etc_dist.errors import WorldError
from etc_dist.world import launcher, mpi, start


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    """As in a process that no launcher has started."""
    for name in list(os.environ):
        if name.startswith(("PMI", "OMPI_", "SLURM_", "_ETC_DIST")):
            monkeypatch.delenv(name)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


ALONE = [
    "WORLD_SIZE=2 RANK=1",
    "WORLD_SIZE=2 RANK=0",
    "SLURM_NTASKS=2 SLURM_PROCID=1",
    "SLURM_NTASKS=2 SLURM_PROCID=0 SLURM_STEP_ID=0",
    "SLURM_STEP_NUM_TASKS=3 SLURM_PROCID=0 SLURM_STEPID=0",
    "FLUX_JOB_SIZE=2 FLUX_TASK_RANK=0",
    "PMI_SIZE=2 PMI_RANK=0",
    "OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_RANK=1",
    "SLURM_STEP_NUM_TASKS=2 PMIX_RANK=1 SLURM_NTASKS=1",
]
NOT_ALONE = [
    "",
    "WORLD_SIZE=1 RANK=0",
    "WORLD_SIZE=2",
    "SLURM_NTASKS=2 SLURM_PROCID=0",  # the script of a batch job
    "PMI_SIZE=1 PMI_RANK=0 WORLD_SIZE=2 RANK=1",
    "SLURM_NTASKS=many SLURM_PROCID=1",
    # The shell of an allocation of several tasks, which is a step of one.
    "SLURM_NTASKS=4 SLURM_STEP_NUM_TASKS=1 SLURM_PROCID=0 SLURM_STEP_ID=4294967290",
    # One rank of Open MPI in it, which sets PMIX_RANK, too.
    "OMPI_COMM_WORLD_SIZE=1 OMPI_COMM_WORLD_RANK=0 PMIX_RANK=0 SLURM_NTASKS=4",
    "PMIX_RANK=0 SLURM_STEP_NUM_TASKS=1 SLURM_NTASKS=4",
]


def set_variables(monkeypatch, text):
    for pair in text.split():
        monkeypatch.setenv(*pair.split("="))


@pytest.mark.parametrize("variables", ALONE)
def test_a_rank_of_several_that_mpi_sees_alone_is_refused(variables, monkeypatch):
    set_variables(monkeypatch, variables)
    with pytest.raises(WorldError, match="without its peers") as caught:
        launcher.refuse_alone()
    assert all(pair in caught.value.got for pair in variables.split()[:1])


@pytest.mark.parametrize("variables", NOT_ALONE)
def test_a_process_that_is_meant_to_be_alone_is_accepted(variables, monkeypatch):
    set_variables(monkeypatch, variables)
    launcher.refuse_alone()


@pytest.mark.mpi(ranks=[1])
def test_a_world_of_one_is_refused_unless_its_communicator_is_given(
    one_rank, monkeypatch
):
    from mpi4py import MPI

    set_variables(monkeypatch, ALONE[0])
    with pytest.raises(WorldError, match="RANK=1, WORLD_SIZE=2"):
        start(one_rank.settings)
    start(one_rank.settings, MPI.COMM_SELF).close()


def test_a_process_that_a_rank_has_started_is_refused_before_mpi(monkeypatch):
    """With the connection to its launcher, and where that was closed."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        set_variables(monkeypatch, f"PMI_RANK=0 PMI_SIZE=2 PMI_FD={ours.fileno()}")
        launcher.mark_rank()
        launcher.refuse_child()  # this process is the rank
        monkeypatch.setattr(os, "getpid", lambda: 1)
        monkeypatch.setitem(sys.modules, "mpi4py", None)
        for number in (ours.fileno(), 10**6):
            monkeypatch.setenv("PMI_FD", str(number))
            with pytest.raises(WorldError, match="a process that a rank") as caught:
                mpi.import_mpi(1.0)
            assert "PMI_RANK, PMI_SIZE, PMI_FD" in caught.value.got
        # A launcher that a rank has started, with a connection of its own.
        monkeypatch.setenv("PMI_FD", str(theirs.fileno()))
        launcher.refuse_child()


def test_a_rank_without_a_connection_to_its_launcher_has_no_job(monkeypatch):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        set_variables(monkeypatch, "PMI_RANK=0 PMI_SIZE=2")
        connection = os.fstat(ours.fileno())
        monkeypatch.setattr(os, "fstat", lambda file: connection)  # standard input's
        launcher.mark_rank()
    assert os.environ["_ETC_DIST_RANK"] == f"{os.getpid()} "


def test_processes_of_another_job_or_of_none_are_accepted(monkeypatch):
    set_variables(monkeypatch, "OMPI_COMM_WORLD_RANK=0 PMIX_NAMESPACE=job-1")
    launcher.mark_rank()
    monkeypatch.setattr(os, "getpid", lambda: 1)
    with pytest.raises(WorldError):
        launcher.refuse_child()
    monkeypatch.setenv("PMIX_NAMESPACE", "job-2")
    launcher.refuse_child()
    monkeypatch.delenv("OMPI_COMM_WORLD_RANK")
    launcher.refuse_child()
