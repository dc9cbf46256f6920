"""All use of MPI: the communicator, the exchange of objects, and the end of the job."""

from __future__ import annotations

import atexit
import ctypes
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType, NoneType
from typing import TYPE_CHECKING, Any, cast

from etc_dist.errors import WorldError, expect_type
from etc_dist.messages import flush_output, show_message
from etc_dist.world import exit_notice, launcher, rank_errors
from etc_dist.world.processes import LAUNCHED, Backoff

if TYPE_CHECKING:
    from mpi4py import MPI

# MPI promises tags up to 32767.
TAGS = 32000
READ_SECONDS = 0.2
"""How long a launcher may take to read the last output."""
_unfinished: list[object] = []
"""Requests that were given up, with the memory that MPI still uses."""


_END_LATE = """
import os, select, sys
process, limit, text = sys.argv[1:]
if not select.select([0], [], [], float(limit))[0]:
    os.write(2, text.encode())
    os.kill(int(process), 9)
"""


def import_mpi(limit: float) -> ModuleType:
    """mpi4py's MPI, started; WorldError where it cannot be used, also in a process that
    a rank has started. The process ends if other ranks do not start MPI within `limit`
    seconds."""
    launcher.refuse_child()
    try:
        with _ends_after(limit):
            from mpi4py import MPI
    except (ImportError, RuntimeError) as fault:
        raise WorldError(
            "MPI cannot be used",
            where="start of the world",
            wanted="mpi4py with an MPI library (MPICH or Open MPI)",
            got=f"{type(fault).__name__}: {fault}",
            fix="pip install mpi4py mpich, or install mpi4py for the site's own MPI; "
            "then start with mpirun -n <ranks> python ...",
        ) from fault
    launcher.mark_rank()
    return MPI


@contextmanager
def _ends_after(limit: float) -> Iterator[None]:
    """Show an error and end this process after `limit` seconds; without this limit
    where no further process can be started.

    NOTE: by another process, since mpi4py keeps Python's lock while MPI_Init waits for
    all ranks."""
    place = launcher.mpi_place()
    if place is None or place[1] == "1" or "mpi4py.MPI" in sys.modules:
        yield
        return
    rank, size = place
    error = rank_errors.not_together(rank, size, limit)
    text = f"{type(error).__name__}: {error}\n"
    # An embedded interpreter does not know its program.
    python = sys.executable or "python3"
    command = [python, "-I", "-S", "-c", _END_LATE, str(os.getpid()), str(limit), text]
    try:
        ending = subprocess.Popen(command, stdin=subprocess.PIPE)
    except OSError as fault:
        show_message(
            f"etc_dist: the start of rank {rank} waits for its peers without a limit, "
            f"as no process can be started to end it: {fault}\n"
        )
        yield
        return
    try:
        yield
    finally:
        ending.communicate()


def check_comm(mpi: ModuleType, comm: Any) -> None:
    """TypeError for a `comm` of `start` that is not a communicator."""
    expect_type(comm, (mpi.Intracomm, NoneType), "comm")


def duplicate(mpi: ModuleType, comm: object, limit: float) -> MPI.Intracomm:
    """A private duplicate of `comm`, whose messages mix with no others. Collective.

    A rank with a wrong `comm` takes part with all ranks of the job, so that its error
    reaches every rank.
    """
    if isinstance(comm, mpi.Comm) and comm == mpi.COMM_NULL:
        # Its peers are in a communicator that does not contain this rank.
        raise rank_errors.null_communicator()
    is_good = isinstance(comm, mpi.Intracomm)
    source = cast("MPI.Intracomm", comm if is_good else mpi.COMM_WORLD)
    ranks, request = source.Idup()
    backoff = Backoff(limit)
    try:
        while not request.Test():
            if not backoff.pause():
                check_comm(mpi, comm)
                raise rank_errors.not_together(source.rank, source.size, limit)
    except BaseException:
        _unfinished.append((ranks, request))
        raise
    return ranks


class MpiGather:
    """`ObjectGather` by MPI's messages.

    MPI's collectives fail for all ranks if one is dead. Here each pair of ranks
    exchanges a message, so the living ranks still receive each other's.
    """

    def __init__(self, comm: MPI.Intracomm):
        """Takes over `comm`, which must be private."""
        from mpi4py import MPI

        self._mpi = MPI
        self._comm = comm
        self.find_lost: Callable[[], frozenset[int]] = frozenset
        self.rank, self.size = comm.rank, comm.size
        self._turn = 0

    def gather(
        self, value: object, limit: float, *, need_all: bool = False
    ) -> dict[int, object]:
        self._turn += 1
        tag = self._turn % TAGS
        payload = pickle.dumps(value)
        peers = [peer for peer in range(self.size) if peer != self.rank]
        sends: dict[int, MPI.Request] = {}
        received: dict[int, object] = {self.rank: value}
        arriving: dict[int, tuple[MPI.Request, bytearray]] = {}
        backoff = Backoff(limit, self.find_lost)
        pending = set(peers)
        try:
            for peer in peers:
                part = [payload, self._mpi.BYTE]
                sends[peer] = self._comm.Isend(part, dest=peer, tag=tag)
            while True:
                for peer in peers:
                    if peer not in received:
                        self._receive(peer, tag, arriving, received)
                pending = {p for p in peers if p not in received or not sends[p].Test()}
                lost = pending & backoff.lost
                hopeless = pending == lost or (need_all and not lost <= received.keys())
                if not pending or hopeless or not backoff.pause():
                    return received
        finally:
            if pending:  # a peer is lost, or an exception came
                _unfinished.append((sends, payload, arriving))

    def _receive(
        self,
        peer: int,
        tag: int,
        arriving: dict[int, tuple[MPI.Request, bytearray]],
        received: dict[int, object],
    ) -> None:
        if peer not in arriving:
            status = self._mpi.Status()
            probe = self._comm.Improbe  # codespell:ignore improbe
            message = probe(source=peer, tag=tag, status=status)
            if message is None:
                return
            buffer = bytearray(status.Get_count(self._mpi.BYTE))
            arriving[peer] = message.Irecv([buffer, self._mpi.BYTE]), buffer
        request, buffer = arriving[peer]
        if request.Test():
            received[peer] = pickle.loads(buffer)

    def barrier(self, limit: float) -> bool:
        request = self._comm.Ibarrier()
        backoff = Backoff(limit, self.find_lost)
        while not request.Test():
            if backoff.lost or not backoff.pause():
                return False
        return True

    def open_channel(self, limit: float) -> MpiChannel:
        return MpiChannel(duplicate(self._mpi, self._comm, limit))

    def close(self) -> None:
        self._comm.Free()

    def abort(self) -> None:
        flush_output()
        # NOTE: MPI also ends the processes that forward the output.
        time.sleep(READ_SECONDS)
        exit_notice.withdraw()
        if LAUNCHED in os.environ:
            # NOTE: launch/mpirun ends the other ranks. MPI_Abort would end those of
            # other hosts first, with an exit code that looks like a failure there.
            os._exit(1)
        self._comm.Abort(1)

    def library(self) -> str:
        # "MPICH Version:  5.0.2", "Open MPI v4.1.6, package: ...": the first words.
        first = self._mpi.Get_library_version().splitlines()[0].split(",")[0]
        return " ".join(["MPI", *first.split()])

    def finalized(self) -> bool:
        return bool(self._mpi.Is_finalized())

    def abort_at_exit(self, code: int) -> None:
        # In place of MPI_Finalize, which waits for every rank.
        self._mpi._set_abort_status(code)
        time.sleep(READ_SECONDS)


class MpiChannel:
    """`Channel` by MPI's messages."""

    transport = "MPI"

    def __init__(self, comm: MPI.Intracomm):
        """Takes over `comm`, which must be private."""
        from mpi4py import MPI

        self._mpi, self._comm = MPI, comm
        self._sending: list[tuple[MPI.Request, object]] = []

    def send(self, rank: int, kind: int, data: Any) -> None:
        self._sending = [one for one in self._sending if not one[0].Test()]
        part = [data, self._mpi.BYTE]
        self._sending.append((self._comm.Isend(part, dest=rank, tag=kind), data))

    def receive(self, kind: int) -> tuple[int, bytearray] | None:
        status = self._mpi.Status()
        probe = self._comm.Improbe  # codespell:ignore improbe
        message = probe(source=self._mpi.ANY_SOURCE, tag=kind, status=status)
        if message is None:
            return None
        buffer = bytearray(status.Get_count(self._mpi.BYTE))
        message.Recv([buffer, self._mpi.BYTE])
        return status.Get_source(), buffer

    def close(self) -> None:
        # Their peers have taken the messages of all calls before.
        self._sending = [one for one in self._sending if not one[0].Test()]
        _unfinished.extend(self._sending)
        self._comm.Free()


@cache
def keep_children_out_of_mpi() -> None:
    """Make MPI_Finalize do nothing in children that are forked from now on.

    mpi4py finalizes MPI at the end of a forked child, too, which would use the parent's
    connections and end the job. MPI_Finalize begins by deleting the attributes of
    MPI_COMM_SELF, and returns the error of a callback that fails. A child sets such an
    attribute at its exit, with a callback in C, since Python has ended by then.
    `getpid` serves as one: it never returns MPI_SUCCESS, which is 0.

    NOTE: MPICH returns that error; Open MPI ignores it.
    """
    from mpi4py import MPI

    library = ctypes.CDLL(MPI.__file__)
    refuse = ctypes.cast(ctypes.CDLL(None).getpid, ctypes.c_void_p)
    key = ctypes.c_int()
    library.MPI_Comm_create_keyval(None, refuse, ctypes.byref(key), None)
    # An int in MPICH, a pointer in Open MPI.
    is_int = MPI._sizeof(MPI.Comm) == ctypes.sizeof(ctypes.c_int)
    handle = ctypes.c_int if is_int else ctypes.c_void_p
    own = handle.from_address(MPI._addressof(MPI.COMM_SELF))

    def begin_child() -> None:
        # NOTE: not now, as a thread of the parent may hold a lock of MPI's; and most
        # children end without exit handlers, or run another program.
        atexit.register(library.MPI_Comm_set_attr, own, key, None)

    os.register_at_fork(after_in_child=begin_child)
