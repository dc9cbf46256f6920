"""How a waiting rank spends its time: yield, then sleep, never past its limit."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

YIELDING = 5e-3
"""Seconds of giving the core away before the first sleep."""
LONGEST_SLEEP = 1e-3
"""Seconds; bounds how late a waiting rank notices."""
GLANCE = 0.2
"""Seconds from one look at who still lives to the next."""


class Patience:
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
