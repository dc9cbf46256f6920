"""The main process of rank 0: which texts join and leave each step."""

from __future__ import annotations

import time
from collections import deque

from etc_dist.models import Model
from etc_dist.serve.channel import Channel
from etc_dist.serve.jobs import Ended, Job, Turn, TurnReport
from etc_dist.serve.stepper import Stepper
from etc_dist.world import World

STEP = Turn()
KINDS = "etc-dist serve: a step", "etc-dist serve: a turn with changes"
MOST_IDLE_SECONDS = 5.0
"""Between turns without a step, which show other ranks that this one lives."""


class Engine:
    """Steps the jobs that come by a channel, and reports each turn."""

    def __init__(self, model: Model, stepper: Stepper, channel: Channel) -> None:
        self._world, self._pages = model.world, model.pages
        self._stepper, self._channel = stepper, channel
        self._waiting: deque[Job] = deque()
        self._alive: set[int] = set()
        """Jobs that wait or run."""
        self._leaves: list[int] = []
        limit = self._world.settings.world_limit / 4
        self._idle_seconds = min(MOST_IDLE_SECONDS, limit)

    def run(self) -> None:
        """Until `Ended`. Raises the error of a step, that of the event loop, and
        WorldError if its process has ended."""
        end: Ended | None = None
        while end is None:
            end = self._receive()
            turn = Turn(is_last=True) if end is not None else self._choose()
            turn = share(self._world, turn)
            before = time.perf_counter()
            progress = self._stepper.run(turn)
            seconds = time.perf_counter() - before
            self._alive.difference_update(p.number for p in progress if p.finish)
            num_running = self._stepper.num_running
            report = TurnReport(
                progress,
                seconds if num_running or progress else None,
                num_running,
                len(self._waiting),
                self._pages.free_pages,
                self._stepper.num_drafts,
            )
            if end is None:
                self._channel.send(report)
        if end.error is not None:
            raise end.error

    def _receive(self) -> Ended | None:
        """Read what has come; wait for it while there is nothing to step."""
        seconds: float | None = 0.0
        if not self._alive:
            seconds = self._idle_seconds if self._world.size > 1 else None
        while self._channel.has_message(seconds):
            message, seconds = self._channel.receive(), 0.0
            if isinstance(message, Ended):
                return message
            self._note(message)
        return None

    def _note(self, message: Job | int) -> None:
        if isinstance(message, Job):
            self._waiting.append(message)
            self._alive.add(message.number)
        elif message in self._alive:  # else it has ended meanwhile
            self._alive.remove(message)
            other_jobs = [job for job in self._waiting if job.number != message]
            if len(other_jobs) < len(self._waiting):
                self._waiting = deque(other_jobs)
            else:
                self._leaves.append(message)

    def _choose(self) -> Turn:
        leaves, self._leaves = tuple(self._leaves), []
        return Turn(tuple(self._stepper.admit(self._waiting)), leaves)


def follow(world: World, stepper: Stepper) -> None:
    """What the other ranks do: the turns of rank 0, until its last one."""
    turn = STEP
    while not turn.is_last:
        turn = share(world, STEP)
        stepper.run(turn)


def share(world: World, turn: Turn) -> Turn:
    """The turn of rank 0. Collective. Most turns are steps without a change, which is
    all that the others need to know: that is faster than to send a turn."""
    has_changes = turn != STEP
    if world.size > 1 and world.follow_first(KINDS, int(has_changes)):
        return world.agree(lambda: turn)[0]
    return turn
