"""How a waiting rank spends its time: yield, then sleep, never past its limit."""

from __future__ import annotations

import os
import time

YIELDING = 5e-3
"""Seconds of giving the core away before the first sleep."""
LONGEST_SLEEP = 1e-3
"""Seconds; bounds how late a waiting rank notices."""


class Patience:
    """One wait of at most `limit` seconds, counted from the first `pause`."""

    def __init__(self, limit: float):
        self._limit = limit
        self._since: float | None = None

    def pause(self) -> bool:
        """Let others run for a moment; False once the limit is over."""
        now = time.monotonic()
        if self._since is None:
            self._since = now
        waited = now - self._since
        if waited >= self._limit:
            return False
        if waited < YIELDING:
            # NOTE: time.sleep(0) costs tens of microseconds of timer set-up on Linux;
            # a plain yield costs half of one and still lets an oversubscribed peer run.
            os.sched_yield()
        else:
            time.sleep(min(LONGEST_SLEEP, waited / 50))
        return True
