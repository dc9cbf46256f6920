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
from etc_dist.world.living import Living
from etc_dist.world.mailbox import Mailbox, MessageMailbox, SharedMailbox
from etc_dist.world.meeting import Meeting
from etc_dist.world.memory import Backend
from etc_dist.world.nvshmem import NvshmemMemory
from etc_dist.world.shared import SharedMemory
from etc_dist.world.world import World

if TYPE_CHECKING:
    from mpi4py import MPI

_current: World | None = None


def start(settings: Settings | None = None, comm: MPI.Intracomm | None = None) -> World:
    """Start a world over `comm` (default: all ranks of the job). Collective.

    `settings` default to the environment's; backend and symmetric_size must be alike
    on all ranks. "auto" is "cuda" where every rank can have a GPU of its own, else
    "cpu". Raises the same error on every rank: WorldError where MPI, GPUs or NVSHMEM
    are missing or ranks are on several hosts, ArgumentError for bad settings.
    The first world that is open is also `current`.
    """
    mpi = _import_mpi()
    everyone: MPI.Intracomm = mpi.COMM_WORLD if comm is None else comm
    # Private duplicates: no message of the user's can meet one of ours.
    ranks: MPI.Intracomm = everyone.Dup()
    split = ranks.Split_type(mpi.COMM_TYPE_SHARED, key=ranks.rank)
    node = cast("MPI.Intracomm", split)
    living = Living.among(ranks)
    exchange = Exchange(ranks, living)
    mailbox: Mailbox = (
        SharedMailbox(node, living)
        if node.size == ranks.size
        else MessageMailbox(exchange)
    )
    fallback = settings or Settings()
    meeting = Meeting(exchange, mailbox, fallback.world_limit)
    try:
        return _start(settings, ranks, node, meeting)
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


def _start(
    settings: Settings | None,
    ranks: MPI.Intracomm,
    node: MPI.Intracomm,
    meeting: Meeting,
) -> World:
    global _current
    first_on_node = node.bcast(ranks.rank)

    def load() -> Settings:
        return settings.checked() if settings else Settings.load()

    # Every rank's own settings go around; a fault on one is raised on all.
    own = meeting.agree(load)[ranks.rank]
    meeting.limit = own.world_limit
    reports = meeting.agree(lambda: _report(own, node, first_on_node))
    choice = choose(reports)
    backend: Backend
    if choice.backend == "cuda":
        device = reports[ranks.rank].device
        backend = NvshmemMemory(meeting, device, own.symmetric_bytes)
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
        backend=settings.backend,
        symmetric_size=settings.symmetric_size,
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
