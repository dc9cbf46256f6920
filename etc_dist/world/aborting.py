"""One rank that fails ends all: its peers would wait for it without end."""

from __future__ import annotations

import os
import sys
import time
import traceback
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from mpi4py import MPI

READ_SECONDS = 0.2


def abort(comm: MPI.Intracomm, error: BaseException) -> NoReturn:
    """Print `error` with its traceback, each line tagged by rank; end all ranks."""
    show(comm.rank, error)
    end_all(comm)


def show(rank: int, error: BaseException) -> None:
    """Print `error` with its traceback, each line tagged by rank."""
    _write(rank, "".join(traceback.format_exception(error)).splitlines())


def end_all(comm: MPI.Intracomm) -> NoReturn:
    """End all ranks, once what this one has printed is read."""
    sys.stdout.flush()
    sys.stderr.flush()
    # NOTE: MPI also ends the processes that pass the output on.
    time.sleep(READ_SECONDS)
    comm.Abort(1)


def end_all_at_exit() -> None:
    """End all ranks in place of MPI_Finalize, which waits for every rank.

    Called while this process exits: its other exit handlers still run.
    """
    from mpi4py import MPI

    MPI._set_abort_status(1)
    time.sleep(READ_SECONDS)


class AbortOnUncaught:
    """An exception hook that ends all ranks; install it once a communicator.

    Test runners catch exceptions themselves, and at a prompt each typing error would
    come here: there the previous hook alone is called.
    """

    def __init__(self, comm: MPI.Intracomm):
        self._comm = comm
        self._previous = sys.excepthook
        self._pid = os.getpid()
        self._removed = False

    def install(self) -> None:
        sys.excepthook = self

    def remove(self) -> None:
        """Restore the previous hook; where another one has replaced this one since,
        do nothing from now on."""
        self._removed = True
        if sys.excepthook is self:
            sys.excepthook = self._previous

    def __call__(
        self,
        kind: type[BaseException],
        error: BaseException,
        trace: TracebackType | None,
    ) -> None:
        # NOTE: an exception in a forked child is not one of the rank.
        forked = os.getpid() != self._pid
        if self._removed or forked or hasattr(sys, "ps1"):
            self._previous(kind, error, trace)
            return
        if self._previous is sys.__excepthook__:
            abort(self._comm, error.with_traceback(trace))
        _write(self._comm.rank, [f"uncaught {kind.__name__}; all ranks are ended"])
        self._previous(kind, error, trace)
        end_all(self._comm)


def _write(rank: int, lines: list[str]) -> None:
    # One write, so that the lines of several ranks do not mix.
    sys.stdout.flush()
    sys.stderr.write("".join(f"[rank {rank}] {line}\n" for line in lines))
    sys.stderr.flush()
