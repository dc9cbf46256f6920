"""Processes and threads: how a rank waits for its peers, which of them have ended,
which threads may call the world, and the hook for uncaught exceptions."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from threading import get_ident
from types import FrameType, TracebackType

from etc_dist.errors import EtcDistError
from etc_dist.messages import flush_output, show_message
from etc_dist.world import rank_errors
from etc_dist.world.memory import Backend

YIELDING = 5e-3
"""Seconds for which a waiting rank yields before its first sleep."""
YIELDING_TO_GPU = 1.0
"""The same of a wait for a GPU: sleeps would make a model's steps longer."""
LONGEST_SLEEP = 1e-3
"""Seconds; bounds the delay of a waiting rank."""
LAUNCHED = "LAUNCH_RANKS"
"""The variable that launch/mpirun sets for its ranks."""
CHECK_SECONDS = 0.2
"""Seconds between two searches for lost ranks."""
_PASSING = ("contextlib", "functools")
"""Modules through which this package may call itself."""

# In /proc/PID/stat, counted from the state, which follows the command's name.
_STATE, _FLAGS, _BEGIN = 0, 6, 19
# Of the flags: set as soon as a process ends. Releasing a GPU's memory can then take
# seconds, in which the process is not yet a zombie.
_EXITING = 0x4

# ----------------------------------------------------------------- waiting for peers


class Backoff:
    """One wait of at most `limit` seconds, counted from the first `pause`.

    `find_lost` returns the ranks that will never answer. It is called from time to
    time; its result is in `lost`. `pause` ignores it: only some ranks may be needed."""

    def __init__(
        self,
        limit: float,
        find_lost: Callable[[], frozenset[int]] | None = None,
        yielding: float = YIELDING,
    ):
        self._limit = limit
        self._yielding = yielding
        self._find_lost = find_lost
        self._since: float | None = None
        self._next_check = CHECK_SECONDS
        self._suspects: frozenset[int] = frozenset()
        self.lost: frozenset[int] = frozenset()

    def pause(self) -> bool:
        """Yield the core, later sleep; False once the limit is over."""
        now = time.monotonic()
        if self._since is None:
            self._since = now
        waited = now - self._since
        if waited >= self._limit:
            return False
        if waited >= self._next_check:
            self._next_check = waited + CHECK_SECONDS
            self._check()
        if waited < self._yielding:
            # NOTE: time.sleep(0) costs tens of microseconds of timer set-up on Linux;
            # a plain yield costs half of one and still runs an oversubscribed peer.
            os.sched_yield()
        else:
            time.sleep(min(LONGEST_SLEEP, waited / 50))
        return True

    def _check(self) -> None:
        # NOTE: a rank counts as lost at the second search that finds it: messages sent
        # just before its end have then been received.
        self.lost = self._suspects
        if self._find_lost is not None:
            self._suspects = self._find_lost()


# ------------------------------------------------------------------ processes of peers


@dataclass(frozen=True)
class Process:
    """A process, identified for others on its host."""

    pid: int
    realm: str
    """The scope of `pid`: one boot of one host, one pid namespace."""
    begin: str
    """Its start time in kernel ticks: differs for a later process with this pid."""

    @classmethod
    def own(cls) -> Process | None:
        """This process; None on systems without Linux's /proc."""
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            realm = f"{boot} {os.readlink('/proc/self/ns/pid')}"
            return cls(os.getpid(), realm, _read("self")[_BEGIN])
        except OSError:
            return None

    def ended(self) -> bool:
        """Whether it has exited, is a zombie, or is exiting; False if unknown."""
        try:
            fields = _read(str(self.pid))
        except (FileNotFoundError, ProcessLookupError):
            return True
        except OSError:
            return False
        ending = fields[_STATE] in "ZXx" or int(fields[_FLAGS]) & _EXITING
        return bool(ending) or fields[_BEGIN] != self.begin

    def stopped(self) -> bool:
        """Whether a signal or a debugger has stopped it; False if unknown."""
        try:
            return _read(str(self.pid))[_STATE] in "Tt"
        except OSError:
            return False


class ProcessMonitor:
    """Finds the ranks whose processes have ended or are stopped.

    Without it, only the time limit ends a wait for a killed peer."""

    def __init__(self, processes: Sequence[Process | None]):
        """`processes` by rank, while all of them are alive; None where unknown."""
        own_process = Process.own()
        # NOTE: a process that is not visible now is never monitored: /proc may belong
        # to another namespace, or hide the processes of others.
        self._processes = [
            process
            if process
            and own_process
            and process.realm == own_process.realm
            and not process.ended()
            else None
            for process in processes
        ]

    def forget_all_but(self, ranks: Container[int]) -> None:
        """Monitor only these ranks from now on."""
        for rank in range(len(self._processes)):
            if rank not in ranks:
                self._processes[rank] = None

    def ended(self, rank: int) -> bool:
        """Whether the process of `rank` has ended; False if unknown."""
        process = self._processes[rank]
        return process is not None and process.ended()

    def stopped(self, rank: int) -> bool:
        """Whether the process of `rank` is stopped; False if unknown."""
        process = self._processes[rank]
        return process is not None and process.stopped()

    def find_ended(self) -> frozenset[int]:
        """All ranks whose processes have ended."""
        return frozenset(filter(self.ended, range(len(self._processes))))


def _read(process: str) -> list[str]:
    """The fields after the command's name, which may hold spaces and brackets."""
    text = Path(f"/proc/{process}/stat").read_text(errors="replace")
    return text.rpartition(")")[2].split()


# ------------------------------------------------------------- forks, threads, signals

_is_child = False


@cache
def watch_forks() -> None:
    """From now on, a forked child cannot call a world."""
    os.register_at_fork(after_in_child=_mark_child)


def _mark_child() -> None:
    global _is_child
    _is_child = True


def is_forked() -> bool:
    """Whether this process was forked from one that had started a world."""
    return _is_child


class Exclusive:
    """The lock of a world, held by each call up to its launch, and that of `start`;
    reentrant.

    A second thread, a forked child, and user code that a call has called get a
    WorldError, without any effect. An exception that leaves a call breaks the world
    through `leave`, as the ranks would pair different calls, except for an EtcDistError
    of this package: all ranks raise it. Where there are no other ranks, the next call
    begins with `recover` instead. During a call the world's GPU is current."""

    def __init__(
        self,
        leave: Callable[[str], None],
        backend: Backend | None,
        recover: Callable[[], None] | None = None,
    ):
        """`backend`: None before there is one. `recover`: None for several ranks."""
        self._leave, self._backend, self._recover = leave, backend, recover
        self._is_interrupted = False
        self._device: int | None = None  # that was current before the call
        # The thread of the current call, and the method that entered first. One key, so
        # that both appear and go at once, also between threads and for signal handlers.
        self._current: dict[None, tuple[int, FrameType]] = {}
        self._agreed_error: BaseException | None = None

    def __enter__(self) -> None:
        try:
            if _is_child:
                raise rank_errors.forked()
            entry = get_ident(), sys._getframe(1)
            holder = self._current.setdefault(None, entry)
            if holder is not entry and self._contains(holder, *entry):
                return
            if holder is not entry:
                self._take_over(holder, entry)
            if self._backend is not None:
                self._device = self._backend.enter()
            if self._is_interrupted and self._recover is not None:
                self._recover()
                self._is_interrupted = False
        except EtcDistError:
            raise
        except BaseException as error:  # of a signal handler
            self._interrupt(f"a call was interrupted by {type(error).__name__}")
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        current = self._current.get(None)
        is_outermost = current is not None and current[1] is sys._getframe(1)
        if error is not None and not _is_child:
            self._check(error)
        if is_outermost:
            self._agreed_error = None
            if self._backend is not None and self._device is not None:
                self._backend.restore(self._device)
            self._current.clear()

    def refuse_nested(self) -> None:
        """WorldError if user code is called by a call of this thread: a NumPy body, a
        signal handler or a finalizer."""
        current = self._current.get(None)
        if current is not None:
            self._contains(current, get_ident(), sys._getframe(1))

    def _contains(
        self, current: tuple[int, FrameType], thread: int, frame: FrameType | None
    ) -> bool:
        """Whether the current call has called `frame`. WorldError if user code is
        between them; calls of this package may nest."""
        owner, method = current
        if owner != thread:
            return False
        user: FrameType | None = None
        while frame is not method:
            if frame is None:
                return False
            if user is None and not _is_ours(frame):
                user = frame
            frame = frame.f_back
        if user is not None:
            raise rank_errors.nested(user.f_code.co_name)
        return True

    def run_if_free(self, step: Callable[[], None]) -> None:
        """Run `step` as a call, unless another one is running. For finalizers, which
        may run at any time and in any thread."""
        entry = get_ident(), sys._getframe()
        if not _is_child and self._current.setdefault(None, entry) is entry:
            try:
                step()
            finally:
                self._current.clear()

    def report(self, error: BaseException) -> None:
        """All ranks have received this error: it does not break the world."""
        self._agreed_error = error

    def _check(self, error: BaseException) -> None:
        is_agreed = isinstance(error, EtcDistError) and (
            self._recover is not None or not is_of_user(error)
        )
        if not is_agreed and error is not self._agreed_error:
            self._interrupt(f"a call was interrupted by {type(error).__name__}")

    def _interrupt(self, why: str) -> None:
        if self._recover is None:
            self._leave(why)
        self._is_interrupted = True

    def _take_over(
        self, holder: tuple[int, FrameType], entry: tuple[int, FrameType]
    ) -> None:
        """Refuse a second thread, unless the call of `holder` is over."""
        while holder[1].f_code is _FINALIZING and _is_running(holder[1]):
            time.sleep(0)
        if _is_running(holder[1]):
            raise rank_errors.second_thread(_name(holder[0]), _name(entry[0]))
        current = self._current.setdefault(None, entry)
        if current is holder:
            # NOTE: a signal handler can raise before `__exit__` has begun.
            self._interrupt("a call was interrupted")
            self._current[None] = entry
        elif current is not entry:
            raise rank_errors.second_thread(_name(current[0]), _name(entry[0]))


_FINALIZING = Exclusive.run_if_free.__code__
"""Calls of other threads wait for this one: finalizers run in any thread."""


def _is_running(method: FrameType) -> bool:
    """Whether some thread executes this frame, or what it has called."""
    try:
        method.clear()
    except RuntimeError:
        return True
    return False


def is_of_user(error: BaseException) -> bool:
    """Whether user code has raised this error, or has called what raised it."""
    trace = error.__traceback__
    while trace is not None and _is_ours(trace.tb_frame):
        trace = trace.tb_next
    return trace is not None


def _is_ours(frame: FrameType) -> bool:
    """Whether the frame is of this package, or of one through which it calls itself."""
    module = str(frame.f_globals.get("__name__"))
    return module.startswith("etc_dist.") or module in _PASSING


def _name(thread: int) -> str:
    names = {t.ident: t.name for t in threading.enumerate()}
    return f"thread {names.get(thread, thread)!r}"


# ---------------------------------------------------------------- uncaught exceptions


class AbortOnUncaught:
    """An exception hook that ends all ranks, since peers would wait for this one.

    At a Python prompt, in a forked child and once removed, it only calls the previous
    hook. Test runners catch exceptions before any hook."""

    def __init__(self, rank: int, abort: Callable[[], object]):
        """`abort` ends all ranks."""
        self._rank, self._abort = rank, abort
        self._is_launched = LAUNCHED in os.environ
        self._previous = sys.excepthook
        self._is_removed = False

    def install(self) -> None:
        """Replace the present hook."""
        sys.excepthook = self

    def remove(self) -> None:
        """Restore the previous hook, unless another one has replaced this one."""
        self._is_removed = True
        if sys.excepthook is self:
            sys.excepthook = self._previous

    def __call__(
        self,
        kind: type[BaseException],
        error: BaseException,
        trace: TracebackType | None,
    ) -> None:
        if self._is_removed or _is_child or hasattr(sys, "ps1"):
            self._previous(kind, error, trace)
            return
        if self._previous is sys.__excepthook__:
            show_error(self._rank, error.with_traceback(trace))
        else:
            _write(self._rank, [f"uncaught {kind.__name__}; all ranks are ended"])
            self._previous(kind, error, trace)
        # launch/mpirun interrupts all ranks, whose `finally` blocks may still run, and
        # ends those that remain.
        if not (self._is_launched and issubclass(kind, KeyboardInterrupt)):
            self._abort()


def exit_code(error: SystemExit) -> int:
    """The exit code of a process that `error` ends, as the parent reads it."""
    code = error.code
    return code & 0xFF if isinstance(code, int) else int(code is not None)


def show_error(rank: int, error: BaseException) -> None:
    """Print `error` with its traceback, each line tagged by rank."""
    _write(rank, "".join(traceback.format_exception(error)).splitlines())


def _write(rank: int, lines: list[str]) -> None:
    # One write, so that the lines of several ranks do not mix.
    flush_output()
    show_message("".join(f"[rank {rank}] {line}\n" for line in lines))
