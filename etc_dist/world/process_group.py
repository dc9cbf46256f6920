"""All use of torch.distributed: the process group whose ranks become a world. Its store
is used once, to connect the ranks."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections import Counter
from types import NoneType
from typing import TYPE_CHECKING, Any

from etc_dist.errors import WorldError, expect_type
from etc_dist.world import rank_errors
from etc_dist.world.cpu_memory import host_key
from etc_dist.world.launcher import mpi_place
from etc_dist.world.processes import Backoff
from etc_dist.world.sockets import SocketTransport, connect_all, listen

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_starts: Counter[str] = Counter()
"""How many worlds this process has started over a group, by its name."""


def import_distributed() -> Any:
    """torch.distributed, with its default group; WorldError where it has none."""
    try:
        from torch import distributed
    except ImportError as fault:
        raise _unusable(f"torch cannot be imported: {fault}") from fault
    if not (distributed.is_available() and distributed.is_initialized()):
        raise _unusable("torch.distributed is not initialised")
    return distributed


def default_group() -> ProcessGroup | None:
    """torch's default group, if the program has made it. None under an MPI launcher.

    WorldError for a rank of torchrun without one: as a world of MPI, it would be alone.
    """
    distributed: Any = sys.modules.get("torch.distributed")
    is_initialized = distributed is not None and distributed.is_initialized()
    is_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    if mpi_place() is None and (is_torchrun or is_initialized):
        group: ProcessGroup = import_distributed().group.WORLD
        return group
    return None


def connect(argument: object, comm: object, limit: float) -> GroupTransport:
    """Connect the ranks of the process group `argument`; `comm` must be None.
    Collective.

    A rank with wrong arguments takes part with all ranks of the job, so that its error
    reaches every rank."""
    distributed = import_distributed()
    if argument is distributed.GroupMember.NON_GROUP_MEMBER:
        # Its peers are in a group that does not contain this rank.
        value = "GroupMember.NON_GROUP_MEMBER"
        raise rank_errors.not_a_member("process_group", value)
    is_good = isinstance(argument, distributed.ProcessGroup)
    group: Any = argument if is_good else distributed.group.WORLD
    rank, size = group.rank(), group.size()
    listener, name = listen(size)
    own_peer = {"name": name, "key": host_key(), "host": socket.gethostname()}
    with listener:
        try:
            peers = _exchange(group, json.dumps(own_peer), limit)
            if len({peer["key"] for peer in peers}) > 1:
                raise _several_hosts([peer["host"] for peer in peers])
            names = [peer["name"] for peer in peers]
            sockets = connect_all(rank, names, listener, limit)
        except (OSError, RuntimeError) as fault:  # of a peer, or of the store
            raise _not_connected(rank, size, fault) from fault
    if len(sockets) < size - 1:
        raise rank_errors.not_together(rank, size, limit)
    return GroupTransport(distributed, group, sockets, argument, comm)


class GroupTransport(SocketTransport):
    """`Transport` between the ranks of a process group."""

    def __init__(
        self,
        distributed: Any,
        group: Any,
        sockets: dict[int, socket.socket],
        argument: object,
        comm: object,
    ):
        """`argument`, `comm`: those of `start`."""
        super().__init__(group.rank(), sockets)
        self._kind, self._group = distributed.ProcessGroup, group
        self._argument, self._comm = argument, comm
        self.group_name = group.group_name
        version = sys.modules["torch"].__version__
        backend = distributed.get_backend(group)
        self.library = f"torch.distributed {version} ({backend})"

    def check(self) -> None:
        expect_type(self._argument, self._kind, "process_group")
        fix = "pass either comm or process_group"
        expect_type(self._comm, NoneType, "comm", fix=fix)

    def device(self) -> int | None:
        bound = getattr(self._group, "bound_device_id", None)
        if bound is not None:
            return int(bound.index)
        import torch

        return torch.cuda.current_device() if torch.cuda.is_initialized() else None


def _exchange(group: Any, own_text: str, limit: float) -> list[dict[str, str]]:
    """Each rank's JSON object, by rank. Collective."""
    rank, size = group.rank(), group.size()
    store = group.get_group_store()
    stem = f"etc_dist/{_starts[group.group_name]}"
    keys = [f"{stem}/{peer}" for peer in range(size)]
    store.set(keys[rank], own_text)
    backoff = Backoff(limit)
    while not store.check(keys):
        if not backoff.pause():
            # A later start of this rank has the same number.
            store.delete_key(keys[rank])
            raise rank_errors.not_together(rank, size, limit)
    _starts[group.group_name] += 1
    return [json.loads(store.get(key)) for key in keys]


def _several_hosts(hosts: list[str]) -> WorldError:
    """The error for a process group with ranks on these hosts, by rank."""
    return WorldError(
        "process groups on several hosts are not supported yet",
        where="start of the world",
        wanted="all ranks on one host",
        got=rank_errors.by_rank(dict(enumerate(hosts))),
        fix="start the ranks on one host, or without process_group by mpirun",
    )


def _not_connected(rank: int, size: int, fault: Exception) -> WorldError:
    return WorldError(
        "the ranks of the process group cannot be connected",
        where=f"start of the world, rank {rank} of {size}",
        wanted="Unix sockets between all ranks, and the group's store",
        got=f"{type(fault).__name__}: {fault}",
        fix="start all ranks on one host, as one user, in one network namespace",
    )


def _unusable(got: str) -> WorldError:
    return WorldError(
        "torch.distributed cannot be used",
        where="start of the world",
        wanted="torch with an initialised default process group",
        got=got,
        fix="start the ranks by torchrun, and call "
        "torch.distributed.init_process_group() before etc_dist.start()",
    )
