"""How a waiting rank spends its time: yield, then sleep, never past its limit."""

from __future__ import annotations

import os
import time

from etc_dist.world.living import Living

YIELDING = 5e-3
"""Seconds of giving the core away before the first sleep."""
LONGEST_SLEEP = 1e-3
"""Seconds; bounds how late a waiting rank notices."""
GLANCE = 0.2
"""Seconds from one look at who still lives to the next."""


class Patience:
    """One wait of at most `limit` seconds, counted from the first `pause`.

    Given the ranks' processes, it also looks from time to time who of them has ended:
    those ranks are in `dead`. It goes on pausing then; the caller knows whom it needs.
    """

    def __init__(self, limit: float, living: Living | None = None):
        self._limit = limit
        self._living = living
        self._since: float | None = None
        self._glance = GLANCE
        self._suspects: frozenset[int] = frozenset()
        self.dead: frozenset[int] = frozenset()

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
        # NOTE: dead is who was so at the look before as well: what a rank brought just
        # before its end has been taken in the meantime, and counts.
        self.dead = self._suspects
        if self._living is not None:
            self._suspects = self._living.all_dead()
