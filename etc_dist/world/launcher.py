"""The variables of launchers: whether this process is a rank of a job, and of which."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator

from etc_dist.errors import WorldError

_STEP_SIZES = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
"""Tasks of Slurm's step, or of the allocation around it: the first one that is set."""
_MPI_RANKS = {
    "PMI_RANK": ("PMI_SIZE",),
    "OMPI_COMM_WORLD_RANK": ("OMPI_COMM_WORLD_SIZE",),
    "PMIX_RANK": _STEP_SIZES,
}
"""Of MPI's launchers: this process's rank, and the number of ranks. The first rank that
is set counts: Open MPI sets PMIX_RANK, too."""
_OTHER_RANKS = {
    "MV2_COMM_WORLD_RANK": "MV2_COMM_WORLD_SIZE",
    "FLUX_TASK_RANK": "FLUX_JOB_SIZE",
    "RANK": "WORLD_SIZE",  # of torch's env://, which torchrun and operators set
}
_IN_SLURM_STEP = ("SLURM_STEP_ID", "SLURM_STEPID")
_MARK = "_ETC_DIST_RANK"
"""The process and the job of the rank that has set it."""


def mpi_place() -> tuple[str, str] | None:
    """This process's rank and the number of ranks, as an MPI launcher gives them; None
    if none has started this process."""
    for rank, size in _mpi_variables():
        return os.environ[rank], os.environ.get(size, "?")
    return None


def _mpi_variables() -> list[tuple[str, str]]:
    """The variables of `mpi_place`, the first pair that counts."""
    pairs = _MPI_RANKS.items()
    return [(rank, _first(sizes)) for rank, sizes in pairs if rank in os.environ][:1]


def refuse_alone() -> None:
    """WorldError where a launcher has started several ranks, though MPI sees only this
    one: each would be a world, and return its own part of each result."""
    if variables := next(_several(), None):
        raise WorldError(
            "a rank would start a world without its peers",
            where="start of the world",
            wanted="MPI that connects the ranks of this launcher, or an initialised "
            "torch.distributed",
            got=f"1 rank in MPI, and {variables}",
            fix="start the ranks by launch/mpirun or the mpirun of mpi4py's MPI, or "
            "call torch.distributed.init_process_group() first; for a world of this "
            "process alone, unset these variables or pass comm=MPI.COMM_SELF",
        )


def _several() -> Iterator[str]:
    """The variables of launchers with several ranks. Where MPI's own launcher has
    started one rank, others' variables come from around it."""
    places = dict(_mpi_variables())
    if not places:
        places |= _OTHER_RANKS
        # NOTE: the script of a batch job has SLURM_NTASKS and SLURM_PROCID=0, too.
        is_first = os.environ.get("SLURM_PROCID", "0") in ("", "0")
        if not is_first or any(name in os.environ for name in _IN_SLURM_STEP):
            places["SLURM_PROCID"] = _first(_STEP_SIZES)
    for rank, size in places.items():
        if _number(size) > 1 and (rank in os.environ or rank == "SLURM_PROCID"):
            yield f"{rank}={os.environ.get(rank, '')}, {size}={os.environ[size]}"


def _first(names: tuple[str, ...]) -> str:
    """The first of these variables that is set, or else the last one."""
    return next((name for name in names if name in os.environ), names[-1])


def _number(name: str) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isascii() and text.isdigit() else 0


def mark_rank() -> None:
    """Note in the environment that this process is the rank of its job."""
    if mpi_place() is not None:
        os.environ[_MARK] = f"{os.getpid()} {_job()}"


def refuse_child() -> None:
    """WorldError in a process that a rank has started with the variables of its job:
    MPI would take it for the rank itself."""
    process, _, job = os.environ.get(_MARK, "").partition(" ")
    is_other = process not in ("", str(os.getpid()))
    if is_other and mpi_place() is not None and _job() in (job, ""):
        names = [n for n in os.environ if n.startswith(("PMI", "OMPI_", "HYDI_"))]
        raise WorldError(
            "a process that a rank has started cannot start a world",
            where=f"process {os.getpid()}",
            wanted="start() in the process that the launcher has started",
            got=f"the variables of the job of process {process}: {', '.join(names)}",
            fix="start it without these variables, as a world of one rank; or by a "
            "launcher of its own",
        )


def _job() -> str:
    """What distinguishes this job from others on the host; "" without a connection to
    its launcher, which most child processes have closed."""
    if "PMIX_NAMESPACE" in os.environ:
        return os.environ["PMIX_NAMESPACE"]
    try:
        status = os.fstat(int(os.environ["PMI_FD"]))
    except (KeyError, ValueError, OSError):
        return ""
    return f"{status.st_dev}:{status.st_ino}" if stat.S_ISSOCK(status.st_mode) else ""
