"""Starting the world: from a communicator or a process group to a backend."""

from __future__ import annotations

import os
import socket
from types import NoneType
from typing import TYPE_CHECKING, Any

from etc_dist.errors import (
    EtcDistError,
    WorldError,
    as_refusal,
    expect_type,
)
from etc_dist.settings import Settings
from etc_dist.world import mpi, processes, rank_errors
from etc_dist.world import process_group as process_groups
from etc_dist.world.agreement import Agreement
from etc_dist.world.board import HostsBoard, SignatureBoard, board_bytes
from etc_dist.world.choice import BACKENDS, Gpus, RankReport, choose, find_gpus
from etc_dist.world.cpu_memory import CpuMemory, host_key, machine_key
from etc_dist.world.gpu_memory import GpuMemory
from etc_dist.world.hosts import Hosts, arrange
from etc_dist.world.memory import Backend
from etc_dist.world.processes import ProcessMonitor
from etc_dist.world.transport import Transport
from etc_dist.world.world import World

if TYPE_CHECKING:
    from mpi4py import MPI
    from torch.distributed import ProcessGroup

_worlds: list[World] = []
"""The worlds in the order of their start, without those that are closed."""
_starting = processes.Exclusive(lambda reason: None, None, recover=lambda: None)
"""Held by the thread that starts a world."""


def start(
    settings: Settings | None = None,
    comm: MPI.Intracomm | None = None,
    *,
    process_group: ProcessGroup | None = None,
    abort_on_uncaught: bool = False,
) -> World:
    """Start a world over `comm`, or over torch's `process_group`. Collective.

    Without both: over torch's default group where the program has initialised
    torch.distributed and no MPI launcher has started it, else over all ranks of the MPI
    job. A process group is used only here, and MPI is not started then.

    `settings` default to the environment's; if given, no variable is read. All except
    cache, timing and host must be equal on all ranks. "auto" is "cuda" where every rank
    can have its own GPU (or share one, with `share_gpu`), else "cpu". The GPU is
    torch's current one where the process uses CUDA in torch already.

    With `abort_on_uncaught`, an uncaught exception on one rank ends all ranks of the
    job: `sys.excepthook` is replaced until the world is closed. It is the default for
    ranks that launch/mpirun has started.

    Raises the same error on every rank: WorldError where MPI, GPUs or NVSHMEM are
    missing, the ranks' hosts do not fit, or MPI connects only one of several ranks;
    TypeError for arguments of a wrong type; ArgumentError for settings out of range or
    different. WorldError also in a process that a rank has started.
    Ranks that pass another communicator or group, do not call `start`, or call it
    inside another call, raise alone; their peers within the default world_limit.
    The first world that is open is also `current`."""
    with _starting:
        for world in _worlds:
            world.exclusive.refuse_nested()
        return _start_alone(settings, comm, process_group, abort_on_uncaught)


def _start_alone(
    settings: Settings | None,
    comm: MPI.Intracomm | None,
    process_group: ProcessGroup | None,
    abort_on_uncaught: bool,
) -> World:
    """`start`, by one thread at a time."""
    limit = Settings.world_limit
    transport = _connect(comm, process_group, limit)
    processes.watch_forks()
    agreement = Agreement(transport, limit)
    try:
        # Exchanges the settings of all ranks; an error on one is raised on all.
        every = agreement.agree(lambda: _check(transport, settings))
        world = _start(every[transport.rank], transport, agreement)
        if world.size > 1 and (abort_on_uncaught or processes.LAUNCHED in os.environ):
            world.abort_on_uncaught()
        _forget_closed()
        _worlds.append(world)
        return world
    except EtcDistError:
        if not agreement.broken:
            agreement.close()
            transport.close()
        raise
    except BaseException as error:
        reason = f"its start was interrupted by {type(error).__name__}"
        agreement.leave(reason, rank_errors.INTERRUPTED)
        raise


def current() -> World:
    """The open world that was started first; starts one if none is open.

    Collective where it starts one. A broken world stays current, so that its next
    call raises instead of hanging, until it is closed or another one is started."""
    for world in _worlds:
        if not world.broken:
            return world
    _forget_closed()
    return _worlds[0] if _worlds else start()


def of_group(name: str) -> World:
    """The open world over torch's process group of this name, one that is not broken
    if there is any; WorldError if there is none."""
    _forget_closed()
    worlds = [world for world in _worlds if world.group_name == name]
    if worlds:
        return next((world for world in worlds if not world.broken), worlds[0])
    raise WorldError(
        "there is no world over this process group",
        where="an operation of torch",
        wanted="etc_dist.start(process_group=...) with this group before",
        got=f"group_name = {name!r}; worlds over the groups "
        f"{[world.group_name for world in _worlds if world.group_name]}",
        fix="start a world over the group, once, on all of its ranks",
    )


def _forget_closed() -> None:
    _worlds[:] = [world for world in _worlds if not world.closed]


def _connect(comm: object, group: object, limit: float) -> Transport:
    """The ranks of the arguments. Collective."""
    if comm is None and group is None:
        group = process_groups.default_group()
    if group is None:
        return mpi.connect(comm, limit)
    return process_groups.connect(group, comm, limit)


def _check(transport: Transport, settings: Any) -> Settings:
    """This rank's checked settings, given or the environment's."""
    try:
        transport.check()
        expect_type(settings, (Settings, NoneType), "settings")
        return Settings.load() if settings is None else settings.checked()
    except TypeError as error:
        raise as_refusal(error, "the arguments of start") from error


def _start(settings: Settings, transport: Transport, agreement: Agreement) -> World:
    agreement.limit = settings.world_limit
    keys = agreement.agree(lambda: f"{settings.host} {host_key()}")
    reports = agreement.agree(lambda: _report(settings, transport, keys))
    choice = choose(reports)
    own_report = reports[transport.rank]
    names = [report.host for report in reports]
    hosts = arrange(transport.rank, [report.node for report in reports], names)
    agreement.monitor.forget_all_but(hosts.near)
    memory = CpuMemory(agreement, hosts)
    agreement.use_board(_board(hosts, memory, transport, agreement.monitor))
    backend: Backend = memory
    if choice.backend == "cuda":
        size = settings.symmetric_bytes
        shared = choice.ranks_per_gpu
        backend = GpuMemory(agreement, hosts, own_report.device, size, shared)
    return World(settings, transport, hosts, agreement, backend, choice.reason)


def _board(
    hosts: Hosts, memory: CpuMemory, transport: Transport, monitor: ProcessMonitor
) -> SignatureBoard | HostsBoard:
    first = hosts.near.start
    near = SignatureBoard(
        hosts.local_rank,
        memory.map(board_bytes(hosts.local_size)),
        lambda: frozenset(rank - first for rank in monitor.find_ended()),
    )
    return HostsBoard(hosts, near, transport, monitor) if hosts.count > 1 else near


def _report(settings: Settings, transport: Transport, keys: list[str]) -> RankReport:
    """This rank's report; `keys`: the keys of hosts by rank."""
    key = keys[transport.rank]
    # A world on the CPU does not load CUDA at all.
    is_on_gpus = settings.backend in BACKENDS and settings.backend != "cpu"
    return RankReport(
        host=settings.host or socket.gethostname(),
        node=keys.index(key),
        local_rank=keys[: transport.rank].count(key),
        settings=settings,
        gpus=find_gpus() if is_on_gpus else Gpus(missing="not looked for"),
        torch_device=transport.device(),
        machine=machine_key(),
    )
