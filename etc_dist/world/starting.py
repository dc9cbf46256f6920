"""Starting the world: from an MPI communicator to ranks that agree on a backend."""

from __future__ import annotations

import socket
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

from etc_dist.errors import ArgumentError, EtcDistError, WorldError
from etc_dist.settings import Settings
from etc_dist.world import gpus
from etc_dist.world.choice import BACKENDS, Report, choose
from etc_dist.world.exchange import Exchange
from etc_dist.world.forked import keep_children_out_of_mpi, refuse_in_child
from etc_dist.world.living import Living
from etc_dist.world.mailbox import Mailbox, MessageMailbox, SharedMailbox
from etc_dist.world.meeting import Meeting
from etc_dist.world.memory import Backend
from etc_dist.world.nvshmem import NvshmemMemory
from etc_dist.world.patience import Patience
from etc_dist.world.shared import SharedMemory
from etc_dist.world.world import World

if TYPE_CHECKING:
    from mpi4py import MPI

_current: World | None = None


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
    split = ranks.Split_type(mpi.COMM_TYPE_SHARED, key=ranks.rank)
    node = cast("MPI.Intracomm", split)
    living = Living.among(ranks)
    exchange = Exchange(ranks)
    mailbox: Mailbox = (
        SharedMailbox(node, living)
        if node.size == ranks.size
        else MessageMailbox(exchange)
    )
    meeting = Meeting(exchange, mailbox, living, Settings.world_limit)
    try:
        # Every rank's own settings go around; a fault on one is raised on all.
        own = meeting.agree(lambda: _check(mpi, settings, comm))[ranks.rank]
        return _start(own, ranks, node, meeting)
    except EtcDistError:
        if not meeting.broken:
            meeting.close()
            node.Free()
            ranks.Free()
        raise


def current() -> World:
    """The open world that was started first; starts one if there is none.

    Collective where it starts one. A broken world stays current, so that its next
    call raises instead of hanging, until it is closed or another one is started.
    """
    global _current
    if _current is None or _current.closed:
        _current = start()
    return _current


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
    patience = Patience(Settings.world_limit)
    while not request.Test():
        if not patience.pause():
            _check_comm(mpi, comm)
            raise WorldError(
                "the ranks do not start a world together",
                where=f"start of the world, rank {place.rank} of {place.size}",
                wanted=f"all ranks of the communicator in {Settings.world_limit:g} s",
                got="not all of them",
                fix="call start on all of its ranks, with the same communicator",
            )
    return ranks


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
    node: MPI.Intracomm,
    meeting: Meeting,
) -> World:
    global _current
    first_on_node = node.bcast(ranks.rank)
    meeting.limit = own.world_limit
    reports = meeting.agree(lambda: _report(own, node, first_on_node))
    choice = choose(reports)
    backend: Backend
    if choice.backend == "cuda":
        device = reports[ranks.rank].device
        shares = choice.ranks_per_gpu
        backend = NvshmemMemory(meeting, device, own.symmetric_bytes, shares)
    else:
        backend = SharedMemory(node, meeting)
    world = World(own, ranks, node, meeting, backend, choice.reason)
    if _current is None or _current.broken:
        _current = world
    return world


def _report(settings: Settings, node: MPI.Intracomm, first_on_node: int) -> Report:
    # A world that is to be on the CPU does not touch CUDA at all.
    wants_gpus = settings.backend in BACKENDS and settings.backend != "cpu"
    return Report(
        host=socket.gethostname(),
        node=first_on_node,
        local_rank=node.rank,
        settings=settings,
        gpus=gpus.find() if wants_gpus else gpus.Gpus(missing="not looked for"),
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
