"""The ranks' processes: which have ended, and how a rank waits for the others."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

# In /proc/PID/stat, counted from the state, which follows the command's name.
_STATE, _FLAGS, _BEGIN = 0, 6, 19
# Of the flags: set as soon as a process ends. Giving a GPU's memory back can then
# take it seconds in which it still looks alive.
_EXITING = 0x4

YIELDING = 5e-3
"""Seconds of giving the core away before the first sleep."""
LONGEST_SLEEP = 1e-3
"""Seconds; bounds how late a waiting rank notices."""
GLANCE = 0.2
"""Seconds from one look at who still lives to the next."""


@dataclass(frozen=True)
class Process:
    """A process, as others on its host can find it."""

    pid: int
    realm: str
    """Where `pid` means this process: one boot of one host, one pid namespace."""
    begin: str
    """When it started, in the kernel's ticks: a later user of `pid` has another."""

    @classmethod
    def own(cls) -> Process | None:
        """This process; None on systems that do not tell (no Linux, no /proc)."""
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            realm = f"{boot} {os.readlink('/proc/self/ns/pid')}"
            return cls(os.getpid(), realm, _read("self")[_BEGIN])
        except OSError:
            return None

    def ended(self) -> bool:
        """Whether it is over: gone, a zombie, or about to be; False if unknown."""
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
    """The processes of all ranks, by rank; None where they cannot be told."""

    def __init__(self, processes: Sequence[Process | None]):
        own = Process.own()
        # NOTE: who cannot be seen now, while all live, is not watched at all: /proc
        # may be another namespace's or hide the processes of others.
        self._processes = [
            process
            if process and own and process.realm == own.realm and not process.ended()
            else None
            for process in processes
        ]

    def dead(self, rank: int) -> bool:
        """Whether the process of `rank` has ended; False where it cannot be told."""
        process = self._processes[rank]
        return process is not None and process.ended()

    def stopped(self, rank: int) -> bool:
        """Whether the process of `rank` is stopped; False where it cannot be read."""
        process = self._processes[rank]
        return process is not None and process.stopped()

    def all_dead(self) -> frozenset[int]:
        """All ranks whose processes have ended."""
        return frozenset(filter(self.dead, range(len(self._processes))))


def _read(process: str) -> list[str]:
    """The fields after the command's name, which may hold spaces and brackets."""
    text = Path(f"/proc/{process}/stat").read_text(errors="replace")
    return text.rpartition(")")[2].split()


class Backoff:
    """One wait of at most `limit` seconds, counted from the first `pause`.

    `find_lost` gives the ranks that cannot come any more. It is called from time to
    time; its result is in `lost`. Pausing continues: the caller knows which it needs.
    """

    def __init__(
        self, limit: float, find_lost: Callable[[], frozenset[int]] | None = None
    ):
        self._limit = limit
        self._find_lost = find_lost
        self._since: float | None = None
        self._glance = GLANCE
        self._suspects: frozenset[int] = frozenset()
        self.lost: frozenset[int] = frozenset()

    def pause(self) -> bool:
        """Let others run for a moment; False once the limit is over."""
        now = time.monotonic()
        if self._since is None:
            self._since = now
        waited = now - self._since
        if waited >= self._limit:
            return False
        if waited >= self._glance:
            self._glance = waited + GLANCE
            self._look()
        if waited < YIELDING:
            # NOTE: time.sleep(0) costs tens of microseconds of timer set-up on Linux;
            # a plain yield costs half of one and still lets an oversubscribed peer run.
            os.sched_yield()
        else:
            time.sleep(min(LONGEST_SLEEP, waited / 50))
        return True

    def _look(self) -> None:
        # NOTE: lost are those that were so at the previous call as well: what a rank
        # sent just before its end has been received in the meantime, and counts.
        self.lost = self._suspects
        if self._find_lost is not None:
            self._suspects = self._find_lost()
