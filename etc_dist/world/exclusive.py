"""A world belongs to one process, and to one thread at a time."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from threading import get_ident
from types import TracebackType
from weakref import WeakSet

from etc_dist.errors import EtcDistError, WorldError

ENTERING_SECONDS = 0.01
"""More than a thread needs from taking the lock to writing its identity."""
_NEVER = 1 << 62


class Exclusive:
    """Entered by each call of a world, from its first step to its launch; reentrant.

    A second thread, or a forked process, gets a WorldError and changes nothing. A call
    that is left by anything but an EtcDistError breaks the world by `give_up`: ranks
    would otherwise pair different calls from then on.
    """

    def __init__(self, give_up: Callable[[str], None]):
        self._give_up = give_up
        self._lock = threading.Lock()
        self._owner = 0
        self._depth = 0
        self._reported: BaseException | None = None
        self.forked = False
        """True in a process that was forked from the one of the world."""
        _alive.add(self)

    def __enter__(self) -> None:
        thread = get_ident()
        if self._owner != thread:
            if not self._lock.acquire(False):
                self._take_over(thread)
            self._owner = thread
        self._depth += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._depth -= 1
        if error is not None:
            self._consider(error)
        if not self._depth:
            self._owner = 0
            self._lock.release()

    def report(self, error: BaseException) -> None:
        """All ranks have this error: it does not break the world."""
        self._reported = error

    def _consider(self, error: BaseException) -> None:
        agreed = isinstance(error, EtcDistError) or error is self._reported
        if not agreed and not self.forked:
            self._give_up(f"a call was interrupted by {type(error).__name__}")
        if not self._depth:
            self._reported = None

    def _take_over(self, thread: int) -> None:
        """Take the lock from a call that is over; refuse `thread` if none is."""
        if self.forked:
            raise forked()
        if not self._owner:
            time.sleep(ENTERING_SECONDS)
        if _runs_call(self._owner):
            raise _second_thread(self._owner, thread)
        # NOTE: a signal handler can raise before `__exit__` has begun, which leaves
        # the lock taken though the call is over.
        self._depth = 0

    def _fork(self) -> None:
        """In the child: refuse all calls, and never release."""
        self.forked = True
        self._lock = threading.Lock()
        self._lock.acquire()
        self._owner, self._depth = -1, _NEVER


_alive: WeakSet[Exclusive] = WeakSet()


def _after_fork() -> None:
    for one in _alive:
        one._fork()


os.register_at_fork(after_in_child=_after_fork)


def _runs_call(thread: int) -> bool:
    """Whether `thread` is inside this package."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        if str(frame.f_globals.get("__name__")).startswith("etc_dist."):
            return True
        frame = frame.f_back
    return False


def _name(thread: int) -> str:
    names = {one.ident: one.name for one in threading.enumerate()}
    return f"thread {names.get(thread, thread)!r}"


def _second_thread(owner: int, caller: int) -> WorldError:
    return WorldError(
        "two threads use one world at the same time",
        where=_name(caller),
        wanted="one call at a time; several threads may call in turn",
        got=f"{_name(caller)} called while {_name(owner)} was inside a call",
        fix="order the calls by a lock, alike on every rank, or make them all in one "
        "thread; this call did nothing, the other one continues",
    )


def forked() -> WorldError:
    """The error for a call in a child process."""
    return WorldError(
        "the world cannot be used: this process is a fork of the one that started it",
        where=f"process {os.getpid()}",
        wanted="calls from the process that called start",
        got="a call from a child that os.fork() made of it",
        fix="make the calls in the parent, or start processes by the method spawn; "
        "the parent's world is unharmed",
    )
