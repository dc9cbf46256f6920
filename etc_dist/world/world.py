"""The world: all ranks of a job, their agreement, and their symmetric memory."""

from __future__ import annotations

import atexit
import operator
import socket
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn, Protocol, TypeVar

from etc_dist.errors import ArgumentError, EtcDistError
from etc_dist.settings import Settings
from etc_dist.world import aborting
from etc_dist.world.agreement import Agreement
from etc_dist.world.exclusive import Exclusive
from etc_dist.world.mailbox import FAILED, INTERRUPTED, UNCLOSED
from etc_dist.world.memory import Backend, SymmetricMemory

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")


class Runs(Protocol):
    """What a world holds: something with runs, the last of which may have failed."""

    def await_end(self) -> EtcDistError | None:
        """Wait for the last run on every rank. Returns the error that ended it, the
        same on all ranks, or None. Collective unless the world is broken."""


class World:
    """All ranks of a job; made by `start`, the same on every rank.

    A call is collective where it says so: every rank makes it, in the same order.
    A call that ranks make differently raises ArgumentError on all of them, and the
    world goes on. A rank that does not come within `settings.world_limit` seconds, or
    whose process is found to have ended, breaks the world: WorldError on the ranks
    that waited, and at once on any later call.
    """

    def __init__(
        self,
        settings: Settings,
        comm: MPI.Intracomm,
        local: tuple[int, int],
        agreement: Agreement,
        backend: Backend,
        reason: str,
    ):
        """For `start`: takes over the private communicator of all ranks. `local` is
        this rank's number on its host, and how many are there."""
        self.settings = settings
        self.rank, self.size = comm.rank, comm.size
        self.local_rank, self.local_size = local
        self.backend: str = backend.name
        self.device: int | str = backend.device
        self.ranks_per_gpu, self.mps = backend.ranks_per_gpu, backend.mps
        self._comm = comm
        self._agreement, self._backend, self._reason = agreement, backend, reason
        self._memories: dict[int, SymmetricMemory] = {}
        self._allocations = 0
        self._held: dict[int, Runs] = {}
        self.kept: dict[object, object] = {}
        """What other layers keep as long as this world is open."""
        self._closed = False
        self.exclusive = Exclusive(lambda why: agreement.leave(why, INTERRUPTED))
        """Entered by every collective call, up to its launch."""
        self._hook = aborting.AbortOnUncaught(comm)
        if self.size > 1:
            self._hook.install()
        atexit.register(self._close_at_exit)

    @property
    def broken(self) -> bool:
        """A rank was lost, or the world is closed: every call raises WorldError."""
        return self._agreement.broken

    @property
    def closed(self) -> bool:
        return self._closed

    def allocate(self, nbytes: int) -> SymmetricMemory:
        """Zeroed symmetric memory of `nbytes` on every rank, 1024-byte aligned.

        Collective. Raises SymmetricMemoryError on every rank if any rank has no room
        (the program may go on), ArgumentError for sizes that are not whole,
        negative, or differ between ranks.
        """
        try:
            count = -1 if isinstance(nbytes, bool) else operator.index(nbytes)
        except TypeError:
            count = -1
        if count < 0:
            self.refuse(_bad_size(nbytes))
        with self.exclusive:
            self._agreement.call(f"world.allocate({count})")
            block = self._backend.allocate(count)
            self._allocations += 1
            memory = SymmetricMemory(
                count, self._allocations, self.rank, block, self._release
            )
            self._memories[memory.number] = memory
            # No rank may write before every block is zero.
            self._agreement.barrier()
        return memory

    def match_call(self, signature: int, describe: Callable[[], str]) -> None:
        """Make sure that every rank makes the same call, before anything is launched.

        Collective; about a microsecond on one host. `signature` is a 63-bit digest of
        the call (the same in every process, so not from `hash` of a str);
        `describe()` gives the call in words and is called only on a mismatch, which
        raises ArgumentError on every rank. Orders no memory: see `barrier`.
        """
        with self.exclusive:
            self._agreement.match_call(signature, describe)

    def refuse(self, error: EtcDistError) -> NoReturn:
        """Take part in the agreement of a call whose arguments are bad on this rank.

        Collective with the peers' `meet`, or their own `refuse`. Every rank raises an
        error of the lowest refusing rank's class that names the refusing ranks and
        their words; on a rank that refused, the cause is that of its own error.
        """
        with self.exclusive:
            self._agreement.refuse(error)

    def agree(self, step: Callable[[], T]) -> list[T]:
        """Run the local `step` on every rank; the picklable results, by rank.

        Collective; a few microseconds beside the step itself on one host. If `step`
        raises on any rank, all ranks raise an error of the lowest failing rank's class
        that names the failing ranks; anything but an EtcDistError becomes WorldError.
        """
        with self.exclusive:
            return self._agreement.agree(step)

    def agree_done(self, step: Callable[[], object]) -> None:
        """As `agree`, without results: costs as little as `meet` where all succeed."""
        with self.exclusive:
            self._agreement.agree_done(step)

    def gather(self, value: object, limit: float | None = None) -> list[object | None]:
        """Each rank's picklable `value`, by rank; None for ranks not heard.

        Collective. Returns after at most `limit` seconds (default: the world limit),
        also when peers are stuck: the living hear each other, and wait for the dead no
        longer than it takes to see that they are. If any rank was not heard, the world
        is broken afterwards.
        """
        with self.exclusive:
            return self._agreement.gather(value, limit)

    def barrier(self, limit: float | None = None) -> None:
        """Wait for all ranks; what they wrote before is visible after. Collective.

        Orders what the CPU wrote; work on GPUs must be synchronised before. Raises
        WorldError after `limit` seconds (default: the world limit), or once a rank is
        known to have ended.
        """
        with self.exclusive:
            self._agreement.barrier(limit)

    def find_lost(self) -> frozenset[int]:
        """The ranks whose processes have ended, or that have left the world."""
        return self._agreement.find_lost()

    def why_lost(self, rank: int) -> str:
        """Why `rank` did not answer, in a few words, as far as it is known."""
        return self._agreement.why_lost(rank)

    def synchronize(self) -> None:
        """Wait for the last run of every program of this world, on every rank.

        Collective. Raises what ended one of these runs, on all ranks: WaitTimeoutError
        for a wait that was not met, ArgumentError for data out of range.
        """
        with self.exclusive:
            self._agreement.call("world.synchronize()")
            fault = self._await_end()
        if fault is not None:
            raise fault

    def hold(self, runs: Runs) -> None:
        """Keep `runs` alive until `release` or `close`; `close` waits for its last run.

        For what a running kernel uses: a temporary may be dropped before its run ends.
        """
        self._held[id(runs)] = runs

    def release(self, runs: Runs) -> None:
        """End `hold`; does nothing for what is not held."""
        self._held.pop(id(runs), None)

    def leave(self, reason: str) -> None:
        """Break the world after a failure of this rank alone: later calls raise
        WorldError, here and on the peers."""
        self._agreement.leave(reason)

    def abort(self, error: BaseException) -> NoReturn:
        """Print `error` and its traceback, tagged by rank, and end all ranks."""
        aborting.abort(self._comm, error)

    def close(self) -> None:
        """Free what is left and end the backend; collective; again does nothing.

        Then raises what ended the last run of a program, as `synchronize` does. On a
        broken world nothing is freed, since that needs every rank.
        """
        if self._closed:
            return
        with self.exclusive:
            fault = self._end_runs()
            self._free()
        if fault is not None:
            raise fault

    def _await_end(self) -> EtcDistError | None:
        faults = [runs.await_end() for runs in list(self._held.values())]
        return next(filter(None, faults), None)

    def _end_runs(self) -> EtcDistError | None:
        """Agree to close the world; what ended the last run of a program, if any."""
        if not self.broken:
            self._agreement.call("world.close()")
        return self._await_end()

    def _free(self) -> None:
        broken = self.broken
        if not broken:
            for memory in reversed(list(self._memories.values())):
                memory.free()
            self._backend.close()
            self._agreement.close()
            self._hook.remove()
            self._comm.Free()
        self._closed = True
        self._held.clear()
        self.kept.clear()
        if not broken:
            atexit.unregister(self._close_at_exit)

    def show(self) -> str:
        """One line: rank, backend and why, how its GPU is shared, host, MPI library."""
        from mpi4py import MPI

        # "MPICH Version:  5.0.2", "Open MPI v4.1.6, package: ...": the first words.
        library = MPI.Get_library_version().splitlines()[0].split(",")[0]
        library = " ".join(library.split())
        detail = ", ".join(filter(None, (self._backend.show(), self._reason)))
        return (
            f"world: rank {self.rank} of {self.size}, backend {self.backend} "
            f"({detail}), host {socket.gethostname()}, MPI {library}"
        )

    def __repr__(self) -> str:
        return f"<World rank {self.rank} of {self.size}, {self.backend}>"

    def _release(self, memory: SymmetricMemory) -> None:
        with self.exclusive:
            self._agreement.call(f"free of {memory.show()}")
            self._backend.free(memory.block)
            del self._memories[memory.number]

    def _close_at_exit(self) -> None:
        from mpi4py import MPI

        if self.exclusive.forked or MPI.Is_finalized():
            return
        # A rank that ends by an error takes part in nothing more, and publishes that:
        # its peers then leave as well instead of waiting for it.
        if getattr(sys, "last_value", None) is not None:
            self._agreement.leave("this rank ended by an error", FAILED)
        try:
            self.close()
        except BaseException as error:
            # The exit code must not be 0, whether calls or a last run failed.
            self._agreement.leave("it was not closed by all ranks", UNCLOSED)
            aborting.show(self.rank, error)
            aborting.end_all_at_exit()
        if self._agreement.lost_process:
            # MPI would wait for the dead to finalize, and for ever.
            aborting.end_all_at_exit()


def _bad_size(nbytes: object) -> ArgumentError:
    return ArgumentError(
        "symmetric memory needs a size in bytes",
        where="world.allocate",
        wanted="a whole number, zero or more, the same on every rank",
        got=repr(nbytes),
        fix="pass the number of bytes as an int",
    )
