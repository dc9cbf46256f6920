"""Starting the world: from an MPI communicator to ranks that agree on a backend."""

from __future__ import annotations

import socket
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

from etc_dist.errors import ArgumentError, EtcDistError, WorldError
from etc_dist.settings import Settings
from etc_dist.world.agreement import Agreement
from etc_dist.world.choice import BACKENDS, Gpus, Report, choose, find_gpus
from etc_dist.world.cpu_memory import CpuMemory
from etc_dist.world.forked import keep_children_out_of_mpi, refuse_in_child
from etc_dist.world.gpu_memory import GpuMemory
from etc_dist.world.mailbox import (
    INTERRUPTED,
    MessageMailbox,
    SignatureBoard,
    mailbox_bytes,
)
from etc_dist.world.memory import Backend
from etc_dist.world.mpi import ObjectGather
from etc_dist.world.pages import SharedPages, host_key
from etc_dist.world.processes import Backoff, Process, ProcessMonitor
from etc_dist.world.world import World

if TYPE_CHECKING:
    from mpi4py import MPI

_worlds: list[World] = []
"""The worlds in the order of their start, without those that are closed."""


def start(settings: Settings | None = None, comm: MPI.Intracomm | None = None) -> World:
    """Start a world over `comm` (default: all ranks of the job). Collective.

    `settings` default to the environment's; if given, no variable counts. backend,
    symmetric_size and share_gpu must be alike on all ranks. "auto" is "cuda" where
    every rank can have its own GPU (or share one, with `share_gpu`), else "cpu".
    Raises the same error on every rank: WorldError where MPI, GPUs or NVSHMEM are
    missing or ranks are on several hosts, ArgumentError for bad arguments.
    Ranks that pass another communicator, or do not call `start`, raise alone, within
    the default world_limit.
    The first world that is open is also `current`.
    """
    mpi = _import_mpi()
    refuse_in_child()
    keep_children_out_of_mpi()
    # Private duplicates: no message of the user's can meet one of ours.
    ranks = _duplicate(mpi, comm)
    exchange = ObjectGather(ranks)
    living = _find_processes(exchange)
    mailbox = MessageMailbox(exchange)
    agreement = Agreement(exchange, mailbox, living, Settings.world_limit)
    try:
        # Every rank's own settings go around; a fault on one is raised on all.
        own = agreement.agree(lambda: _check(mpi, settings, comm))[ranks.rank]
        return _start(own, ranks, living, agreement)
    except EtcDistError:
        if not agreement.broken:
            agreement.close()
            ranks.Free()
        raise
    except BaseException as error:
        reason = f"its start was interrupted by {type(error).__name__}"
        agreement.leave(reason, INTERRUPTED)
        raise


def current() -> World:
    """The open world that was started first; starts one if there is none.

    Collective where it starts one. A broken world stays current, so that its next
    call raises instead of hanging, until it is closed or another one is started.
    """
    _forget_closed()
    usable = [world for world in _worlds if not world.broken]
    return next(iter(usable or _worlds), None) or start()


def _forget_closed() -> None:
    _worlds[:] = [world for world in _worlds if not world.closed]


def given_world(world: Any) -> World:
    """The world that was given, or the current one for None; others are refused."""
    if world is None:
        return current()
    if not isinstance(world, World):
        current().refuse(
            ArgumentError(
                "argument world is no world",
                where="argument world",
                wanted="what etc_dist.start() returns, or None for the current one",
                got=repr(world),
                fix="leave it out, or pass such a world",
            )
        )
    return world


def _duplicate(mpi: ModuleType, comm: object) -> MPI.Intracomm:
    """A duplicate of `comm`; or of all ranks of the job, also for a rank whose `comm`
    is none: it takes part, so that all hear of it."""
    if isinstance(comm, mpi.Comm) and comm == mpi.COMM_NULL:
        # Its peers are in a communicator that this rank has no part in.
        raise _unfit("comm: an open communicator, or None", "comm = MPI.COMM_NULL")
    is_good = isinstance(comm, mpi.Intracomm)
    place = cast("MPI.Intracomm", comm if is_good else mpi.COMM_WORLD)
    ranks, request = place.Idup()
    patience = Backoff(Settings.world_limit)
    while not request.Test():
        if not patience.pause():
            _check_comm(mpi, comm)
            raise _not_together(place.rank, place.size)
    return ranks


def _find_processes(exchange: ObjectGather) -> ProcessMonitor:
    """The processes of all ranks. Collective; WorldError where one does not answer."""
    limit = Settings.world_limit
    heard = exchange.gather(Process.own(), limit)
    if len(heard) == exchange.size:
        living = ProcessMonitor(
            [cast("Process | None", heard[r]) for r in range(len(heard))]
        )
        exchange.find_lost = living.all_dead
        # No rank may end before all have seen each other alive.
        if len(exchange.gather(None, limit, need_all=True)) == exchange.size:
            return living
    raise _not_together(exchange.rank, exchange.size)


def _not_together(rank: int, size: int) -> WorldError:
    return WorldError(
        "the ranks do not start a world together",
        where=f"start of the world, rank {rank} of {size}",
        wanted=f"all ranks of the communicator in {Settings.world_limit:g} s",
        got="not all of them",
        fix="call start on all of its ranks, with the same communicator",
    )


def _check(mpi: ModuleType, settings: Any, comm: Any) -> Settings:
    """This rank's settings, its own or the environment's; ArgumentError for bad ones,
    and for a `comm` that is none."""
    _check_comm(mpi, comm)
    if settings is None:
        return Settings.load()
    if not isinstance(settings, Settings):
        wanted = "settings: an etc_dist.Settings, or None for the environment's"
        raise _unfit(wanted, f"settings = {settings!r}")
    return settings.checked()


def _check_comm(mpi: ModuleType, comm: Any) -> None:
    if comm is not None and not isinstance(comm, mpi.Intracomm):
        raise _unfit("comm: an MPI.Intracomm of mpi4py, or None", f"comm = {comm!r}")


def _unfit(wanted: str, got: str) -> ArgumentError:
    return ArgumentError(
        "the arguments of start do not fit",
        where="start of the world",
        wanted=wanted,
        got=got,
        fix="leave it out, or pass such a one",
    )


def _start(
    own: Settings,
    ranks: MPI.Intracomm,
    living: ProcessMonitor,
    agreement: Agreement,
) -> World:
    agreement.limit = own.world_limit
    keys = agreement.agree(host_key)
    reports = agreement.agree(lambda: _report(own, ranks.rank, keys))
    choice = choose(reports)
    pages = SharedPages(agreement)
    lines = pages.map(mailbox_bytes(ranks.size))
    agreement.use(SignatureBoard(ranks.rank, lines, living))
    backend: Backend
    if choice.backend == "cuda":
        device = reports[ranks.rank].device
        shares = choice.ranks_per_gpu
        backend = GpuMemory(agreement, device, own.symmetric_bytes, shares)
    else:
        backend = CpuMemory(pages, ranks.size)
    local = reports[ranks.rank].local_rank, keys.count(keys[ranks.rank])
    world = World(own, ranks, local, agreement, backend, choice.reason)
    _forget_closed()
    _worlds.append(world)
    return world


def _report(settings: Settings, rank: int, keys: list[str]) -> Report:
    """What this rank reports; `keys` of hosts by rank."""
    # A world that is to be on the CPU does not touch CUDA at all.
    wants_gpus = settings.backend in BACKENDS and settings.backend != "cpu"
    return Report(
        host=socket.gethostname(),
        node=keys.index(keys[rank]),
        local_rank=keys[:rank].count(keys[rank]),
        settings=settings,
        gpus=find_gpus() if wants_gpus else Gpus(missing="not looked for"),
    )


def _import_mpi() -> ModuleType:
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as fault:
        raise WorldError(
            "MPI cannot be used",
            where="start of the world",
            wanted="mpi4py with an MPI library (MPICH or Open MPI)",
            got=f"{type(fault).__name__}: {fault}",
            fix="pip install mpi4py mpich, or install mpi4py beside the site's own "
            "MPI; then start with mpirun -n <ranks> python ...",
        ) from fault
    return MPI
