"""All use of MPI: its start, the messages, and the end of the job."""

from __future__ import annotations

import atexit
import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from types import ModuleType, NoneType
from typing import TYPE_CHECKING, cast

from etc_dist.errors import WorldError, expect_type
from etc_dist.messages import flush_output, show_message
from etc_dist.world import far_transport, launcher, rank_errors
from etc_dist.world.processes import LAUNCHED, Backoff
from etc_dist.world.transport import CALL, Transport

if TYPE_CHECKING:
    from mpi4py import MPI

READ_SECONDS = 0.2
"""How long a launcher may take to read the last output."""
_unfinished: list[object] = []
"""Transports and requests, until MPI does not use their memory any more."""


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

    NOTE: by another process, since mpi4py keeps Python's lock while MPI_Init waits."""
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


def connect(comm: object, limit: float) -> MpiTransport:
    """Connect the ranks of `comm`, by default those of the job. Collective.

    A rank with a wrong `comm` takes part with all ranks of the job, so that its error
    reaches every rank."""
    mpi = import_mpi(limit)
    if comm is None and mpi.COMM_WORLD.size == 1:
        launcher.refuse_alone()
    keep_children_out_of_mpi()
    if isinstance(comm, mpi.Comm) and comm == mpi.COMM_NULL:
        # Its peers are in a communicator that does not contain this rank.
        raise rank_errors.not_a_member("comm", "MPI.COMM_NULL")
    is_good = isinstance(comm, mpi.Intracomm)
    source = cast("MPI.Intracomm", comm if is_good else mpi.COMM_WORLD)
    ranks, request = source.Idup()
    backoff = Backoff(limit)
    try:
        while not request.Test():
            if not backoff.pause():
                _check(mpi, comm)
                raise rank_errors.not_together(source.rank, source.size, limit)
    except BaseException:
        _unfinished.append((ranks, request))
        raise
    return MpiTransport(mpi, ranks, comm)


def _check(mpi: ModuleType, comm: object) -> None:
    expect_type(comm, (mpi.Intracomm, NoneType), "comm")


@dataclass(eq=False)
class _Message:
    """A message that MPI sends or receives, with the memory that it uses for it."""

    rank: int
    kind: int
    request: MPI.Request
    data: bytes | bytearray


class MpiTransport(Transport):
    """`Transport` by MPI's messages.

    MPI's collectives fail for all ranks if one is dead. A message between two ranks
    needs only these."""

    name = "MPI"

    def __init__(self, mpi: ModuleType, comm: MPI.Intracomm, argument: object):
        """Takes over `comm`, which must be private. `argument`: that of `start`."""
        self._mpi, self._comm, self._argument = mpi, comm, argument
        self.rank, self.size = comm.rank, comm.size
        # "MPICH Version:  5.0.2", "Open MPI v4.1.6, package: ...": the first words.
        first = mpi.Get_library_version().splitlines()[0].split(",")[0]
        self.library = " ".join(["MPI", *first.split()])
        self._sending: list[_Message] = []
        self._arriving: list[_Message] = []
        _unfinished.append(self)

    def check(self) -> None:
        _check(self._mpi, self._argument)

    def send(self, rank: int, kind: int, data: bytes) -> None:
        request = self._comm.Isend([data, self._mpi.BYTE], dest=rank, tag=kind)
        self._sending.append(_Message(rank, kind, request, data))

    def receive(self, kind: int) -> tuple[int, bytes | bytearray] | None:
        status = self._mpi.Status()
        probe = self._comm.Improbe  # codespell:ignore improbe
        message = probe(source=self._mpi.ANY_SOURCE, tag=kind, status=status)
        if message is not None:
            data = bytearray(status.Get_count(self._mpi.BYTE))
            request = message.Irecv([data, self._mpi.BYTE])
            self._arriving.append(_Message(status.Get_source(), kind, request, data))
        # Those of a rank in order: a later one that is complete waits.
        waiting: set[int] = set()
        for arrival in self._arriving:
            if arrival.kind == kind and arrival.rank not in waiting:
                if arrival.request.Test():
                    self._arriving.remove(arrival)
                    return arrival.rank, arrival.data
                waiting.add(arrival.rank)
        return None

    def find_unsent(self, kind: int) -> set[int]:
        self._sending = [send for send in self._sending if not send.request.Test()]
        return {send.rank for send in self._sending if send.kind == kind}

    def close(self) -> None:
        # The peers have taken the messages of all calls before.
        self.find_unsent(CALL)
        if not self._sending:
            _unfinished.remove(self)
        self._comm.Free()

    def abort(self) -> None:
        flush_output()
        # NOTE: MPI also ends the processes that forward the output.
        time.sleep(READ_SECONDS)
        far_transport.withdraw()
        if LAUNCHED in os.environ:
            # NOTE: launch/mpirun ends the other ranks. MPI_Abort would end those of
            # other hosts first, with an exit code that looks like a failure there.
            os._exit(1)
        self._comm.Abort(1)

    def abort_at_exit(self, code: int) -> None:
        # In place of MPI_Finalize, which waits for every rank.
        self._mpi._set_abort_status(code)
        time.sleep(READ_SECONDS)

    def is_finalized(self) -> bool:
        return bool(self._mpi.Is_finalized())


@cache
def keep_children_out_of_mpi() -> None:
    """Make MPI_Finalize do nothing in children that are forked from now on.

    mpi4py finalizes MPI at the end of a forked child, too, which would use the parent's
    connections and end the job. MPI_Finalize begins by deleting the attributes of
    MPI_COMM_SELF, and returns the error of a callback that fails. A child sets such an
    attribute at its exit, with a callback in C, since Python has ended by then.
    `getpid` serves as one: it never returns MPI_SUCCESS, which is 0.

    NOTE: MPICH returns that error; Open MPI ignores it."""
    from mpi4py import MPI

    library = ctypes.CDLL(MPI.__file__)
    refuse = ctypes.cast(ctypes.CDLL(None).getpid, ctypes.c_void_p)
    key = ctypes.c_int()
    library.MPI_Comm_create_keyval(None, refuse, ctypes.byref(key), None)
    # An int in MPICH, a pointer in Open MPI.
    is_int = MPI._sizeof(MPI.Comm) == ctypes.sizeof(ctypes.c_int)
    handle = ctypes.c_int if is_int else ctypes.c_void_p
    own_handle = handle.from_address(MPI._addressof(MPI.COMM_SELF))

    def begin_child() -> None:
        # NOTE: not now, as a thread of the parent may hold a lock of MPI's; and most
        # children end without exit handlers, or run another program.
        atexit.register(library.MPI_Comm_set_attr, own_handle, key, None)

    os.register_at_fork(after_in_child=begin_child)
