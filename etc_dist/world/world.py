"""The world: all ranks of a job, their agreement, and their symmetric memory."""

from __future__ import annotations

import atexit
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NoReturn, Protocol, Self, TypeVar

from etc_dist.errors import EtcDistError, as_refusal, expect_range
from etc_dist.settings import Settings
from etc_dist.world import processes
from etc_dist.world.agreement import Agreement
from etc_dist.world.hosts import Hosts
from etc_dist.world.memory import Backend, SymmetricMemory
from etc_dist.world.processes import AbortOnUncaught, Exclusive
from etc_dist.world.rank_errors import BLOCK_LEFT, FAILED, INTERRUPTED, UNCLOSED
from etc_dist.world.transport import Transport

T = TypeVar("T")


class Runs(Protocol):
    """The runs of a program, of which the last may have failed, and their memory.
    number: equal on all ranks."""

    number: int

    def await_end(self) -> EtcDistError | None:
        """Wait for the last run on every rank. Returns the error that ended it, the
        same on all ranks, or None. Collective unless the world is broken."""

    def recover(self) -> None:
        """Make runs possible after an interrupted call, on a world of one rank."""

    def close(self) -> None:
        """Free the memory, and call `World.release`. Collective."""


class World:
    """All ranks of a job; made by `start`, the same on every rank.

    rank, size: this rank, and the number of ranks. local_rank, local_size: the same on
    its host. hosts: the placement of ranks on hosts. backend: "cuda" or "cpu". device:
    the number of this rank's GPU, or "cpu". ranks_per_gpu: above 1 if ranks share a
    GPU. mps: whether CUDA MPS serves it.

    A call is collective where it says so: every rank makes it, in the same order. A
    call that ranks make differently raises ArgumentError on all of them, and the world
    stays usable. A rank that does not call within `settings.world_limit` seconds, or
    whose process has ended, breaks the world: WorldError on the ranks that waited, and
    at once on any later call.

    A context manager: `with etc_dist.start() as world:` closes the world at the end of
    the block. If an exception leaves the block, this rank leaves the world instead:
    calls of its peers raise a WorldError that names it, and the exception continues.
    Where there are no peers, the world is closed."""

    def __init__(
        self,
        settings: Settings,
        transport: Transport,
        hosts: Hosts,
        agreement: Agreement,
        backend: Backend,
        reason: str,
    ):
        """For `start`. `reason` says why the backend was chosen."""
        self.settings = settings
        self.rank, self.size = agreement.rank, agreement.size
        self.hosts, self.transport = hosts, transport
        self.local_rank, self.local_size = hosts.local_rank, hosts.local_size
        self.backend: str = backend.name
        self.device: int | str = backend.device
        self.ranks_per_gpu, self.mps = backend.ranks_per_gpu, backend.mps
        self.group_name = transport.group_name
        """The name of the process group of torch that this world was started over."""
        self._agreement, self._backend, self._reason = agreement, backend, reason
        self._memories: dict[int, SymmetricMemory] = {}
        self._allocations = 0
        self._runs: dict[int, Runs] = {}
        self._dropped: set[int] = set()
        """The numbers of runs that not all ranks have dropped yet."""
        self._errors: list[EtcDistError] = []
        """Of the last runs of programs that were dropped."""
        self.kept: dict[object, object] = {}
        """Objects that other layers cache until the world is closed."""
        self._is_closed = False
        self._exit_code = 0
        """That of a SystemExit which has left the with block."""
        self.exclusive = Exclusive(
            lambda why: agreement.leave(why, INTERRUPTED),
            backend,
            recover=self._recover if self.size == 1 else None,
        )
        """Entered by every collective call, up to its launch."""
        agreement.report = self.exclusive.report
        self._hook = AbortOnUncaught(self.rank, self._abort)
        atexit.register(self._close_at_exit)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        if kind is None:
            self.close()
            return
        if self.size == 1:
            with suppress(EtcDistError):  # of a last run: the exception came first
                self.close()
            return
        self._agreement.leave(f"{kind.__name__} left its with block", BLOCK_LEFT)
        if isinstance(error, SystemExit):
            self._exit_code = processes.exit_code(error)

    @property
    def broken(self) -> bool:
        """A rank was lost, or the world is closed: every call raises WorldError."""
        return self._agreement.broken

    @property
    def closed(self) -> bool:
        """Whether `close` has ended the world on this rank."""
        return self._is_closed

    def allocate(self, nbytes: int) -> SymmetricMemory:
        """Zeroed symmetric memory of `nbytes` on every rank, 1024-byte aligned.

        Collective. Raises SymmetricMemoryError on every rank if any rank does not have
        the memory (the program may continue), TypeError if `nbytes` is not an integer,
        ArgumentError if it is negative or differs between ranks."""
        with self.exclusive:
            with self.refusing("the argument nbytes"):
                count = expect_range(nbytes, 0, None, "nbytes")
            self._agreement.call(f"world.allocate({count})")
            self.free_dropped()
            block = self._backend.allocate(count)
            self._allocations += 1
            memory = SymmetricMemory(
                count, self._allocations, self.rank, block, self._free_memory
            )
            self._memories[memory.number] = memory
            # No rank may write before every block is zero.
            self._agreement.barrier()
        return memory

    def free_bytes(self) -> int:
        """The bytes that this rank can still allocate for its own arrays: an equal part
        of what is free on its GPU, or on its host. Local."""
        with self.exclusive:
            return self._backend.free_bytes()

    def match_call(self, signature: int, describe: Callable[[], str]) -> None:
        """Internal: make sure that every rank makes the same call, before anything is
        launched.

        Collective; about a microsecond on one host. `signature` is a 63-bit digest of
        the call (the same in every process, so not from `hash` of a str);
        `describe()` gives the call in words and is called only on a mismatch, which
        raises ArgumentError on every rank. Orders no memory: see `barrier`."""
        with self.exclusive:
            self._agreement.match_call(signature, describe)

    def largest(self, signature: int, number: int, describe: Callable[[], str]) -> int:
        """Internal: the largest `number` of all ranks, which make the same call, as
        `match_call` shows. Collective, and as fast. number: at least 0; ArgumentError
        on all ranks from 2**28 on."""
        with self.exclusive:
            return self._agreement.largest(signature, number, describe)

    def follow_first(self, choices: Sequence[str], chosen: int = 0) -> int:
        """Internal: the position in `choices` of what rank 0 has chosen; `chosen` of
        other ranks is not used.

        Collective; as fast as `match_call`. choices: texts that are equal on all ranks
        and that describe no other call. Raises ArgumentError as `match_call`."""
        with self.exclusive:
            return self._agreement.follow_first(choices, chosen)

    def refuse(self, error: EtcDistError) -> NoReturn:
        """Internal: raise on all ranks, in place of a call whose arguments are bad on
        this rank.

        Collective with the peers' `match_call`, or their own `refuse`. Every rank
        raises an error of the lowest refusing rank's class that names the refusing
        ranks and their errors; on a rank that refused, its cause is that of `error`."""
        with self.exclusive:
            self._agreement.refuse(error)

    @contextmanager
    def refusing(self, what: str) -> Iterator[None]:
        """Internal: `refuse` an error of the block, in which the arguments `what` are
        checked."""
        try:
            yield
        except Exception as error:
            self.refuse(as_refusal(error, what))

    def agree(self, step: Callable[[], T]) -> list[T]:
        """Run the local `step` on every rank; the picklable results, by rank.

        Collective; a few microseconds more than the step itself on one host. If `step`
        raises on any rank, all ranks raise an error of the lowest failing rank's class
        that names the failing ranks; anything but an EtcDistError becomes WorldError.
        """
        with self.exclusive:
            return self._agreement.agree(step)

    def agree_done(self, step: Callable[[], object]) -> None:
        """Internal: as `agree`, without results: as fast as `match_call` if all
        succeed."""
        with self.exclusive:
            self._agreement.agree_done(step)

    def gather(self, value: object) -> list[object | None]:
        """Each rank's picklable `value`, by rank; None for ranks that did not answer.

        Collective. Returns within the world limit, also when peers are stuck: living
        ranks receive each other's values, and do not wait for ranks that have ended.
        If any rank did not answer, the world is broken afterwards."""
        with self.exclusive:
            return self._agreement.gather(value)

    def barrier(self) -> None:
        """Wait for all ranks; their earlier writes are visible after it. Collective.

        Orders writes of the CPU; work on GPUs must be synchronised before. Raises
        WorldError after the world limit, or once a rank is known to have ended."""
        with self.exclusive:
            self._agreement.barrier()

    def find_lost(self) -> frozenset[int]:
        """Internal: the ranks whose processes have ended, or that have left the
        world."""
        return self._agreement.find_lost()

    def why_lost(self, rank: int) -> str:
        """Internal: the known reason why `rank` did not answer, in a few words."""
        return self._agreement.why_lost(rank)

    def synchronize(self) -> None:
        """Wait for the last run of every program of this world, on every rank.

        Collective. Raises the error of a failed run on all ranks: WaitTimeoutError for
        a wait that was not met, ArgumentError for data out of range."""
        with self.exclusive:
            self._agreement.call("world.synchronize()")
            error = self._await_end()
            self.free_dropped()
        if error is not None:
            raise error

    def hold(self, runs: Runs) -> None:
        """Internal: keep `runs` alive until `release` or `close`; `close` waits for its
        last run.

        Needed for objects that a running kernel uses, also if they are temporaries."""
        self._runs[runs.number] = runs

    def release(self, runs: Runs) -> None:
        """Internal: end `hold`; no effect on other objects."""
        self._runs.pop(runs.number, None)
        self._dropped.discard(runs.number)

    def drop(self, runs: Runs) -> None:
        """Internal: free `runs` once all ranks have dropped it. Local, for finalizers:
        ranks collect garbage at different times, also during a call or a capture."""
        if self._runs.get(runs.number) is runs:
            self._dropped.add(runs.number)
        if self.size == 1 and self.backend == "cpu" and not self.broken:
            self.exclusive.run_if_free(self.free_dropped)

    def free_dropped(self) -> None:
        """Free the programs that all ranks have dropped. Collective.

        `allocate`, `synchronize`, `close` and `etc_dist.compile` do it, too. The error
        of such a program's last run is raised by `synchronize` or `close`."""
        with self.exclusive:
            numbers = self._agreement.agree(lambda: list(self._dropped))
            for number in sorted(set(numbers[0]).intersection(*numbers)):
                runs = self._runs[number]
                error = runs.await_end()
                if error is not None:
                    self._errors.append(error)
                runs.close()

    def leave(self, reason: str) -> None:
        """Internal: break the world after a failure of this rank alone: later calls
        raise WorldError, here and on the peers."""
        self._agreement.leave(reason)

    def abort_on_uncaught(self) -> None:
        """Until the world is closed, an uncaught exception here ends all ranks."""
        self._hook.install()

    def close(self) -> None:
        """Free symmetric memory and end the backend. Collective, idempotent.

        Then raises the error of a failed run, as `synchronize` does. On a broken world
        nothing is freed, since that needs every rank."""
        if self._is_closed:
            return
        with self.exclusive:
            if not self.broken:
                self._agreement.call("world.close()")
            error = self._await_end()
            self._free()
        if error is not None:
            raise error

    def _await_end(self) -> EtcDistError | None:
        errors: list[EtcDistError | None] = [*self._errors]
        errors += [runs.await_end() for runs in list(self._runs.values())]
        self._errors.clear()
        return next(filter(None, errors), None)

    def _recover(self) -> None:
        """After an interrupted call, on one rank: end its run, clear its counters."""
        for runs in list(self._runs.values()):
            runs.recover()

    def _free(self) -> None:
        broken = self.broken
        if not broken:
            for memory in reversed(list(self._memories.values())):
                memory.free()
            self._backend.close()
            self._agreement.close()
            self._hook.remove()
            self.transport.close()
        self._is_closed = True
        self._runs.clear()
        self._dropped.clear()
        self.kept.clear()
        if not broken:
            atexit.unregister(self._close_at_exit)

    def show(self) -> str:
        """One line: rank, backend and why, how its GPU is shared, host, ranks of each
        host and what connects them, launcher."""
        detail = ", ".join(filter(None, (self._backend.show(), self._reason)))
        host, hosts = self.settings.host or socket.gethostname(), self.hosts
        if hosts.count > 1:
            host += (
                f" ({hosts.own + 1} of {hosts.count} hosts of {hosts.local_size} ranks,"
                f" connected by {self.transport.name})"
            )
        return (
            f"world: rank {self.rank} of {self.size}, backend {self.backend} "
            f"({detail}), host {host}, {self.transport.library}"
        )

    def __repr__(self) -> str:
        return f"<World rank {self.rank} of {self.size}, {self.backend}>"

    def _free_memory(self, memory: SymmetricMemory) -> None:
        with self.exclusive:
            self._agreement.call(f"free of {memory.show()}")
            self._backend.free(memory.block)
            self._memories.pop(memory.number, None)

    def _abort(self) -> None:
        self._agreement.await_ends()
        self.transport.abort()

    def _close_at_exit(self) -> None:
        if processes.is_forked() or self.transport.is_finalized():
            return
        # A rank that ends with an error publishes that it makes no further call, so
        # that its peers do not wait for it.
        if getattr(sys, "last_value", None) is not None:
            self._agreement.leave("this rank ended with an error", FAILED)
        was_broken = self.broken
        try:
            self.close()
            if not was_broken:
                return
        except BaseException as error:
            # The exit code must not be 0, whether calls or a last run failed.
            self._agreement.leave("it was not closed by all ranks", UNCLOSED)
            processes.show_error(self.rank, error)
            self._agreement.await_ends()
            self.transport.abort_at_exit(1)
        if self._exit_code or self._agreement.lost_process:
            # MPI would wait for ranks that still run, forever for an ended one.
            self.transport.abort_at_exit(self._exit_code or 1)
