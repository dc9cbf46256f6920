"""The main thread of rank 0: which texts join and leave each step."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue

from etc_dist.models import Model
from etc_dist.serve.jobs import Ended, Job, Progress, Turn
from etc_dist.serve.metrics import Metrics
from etc_dist.serve.stepper import Stepper
from etc_dist.world import World

Message = Job | int | Ended
"""A job that begins, the number of one whose client has left, or the end."""
STEP = Turn()
KINDS = "etc-dist serve: a step", "etc-dist serve: a turn with changes"
MOST_IDLE_SECONDS = 5.0
"""Between turns without a step, which show other ranks that this one lives."""


class Engine:
    """Steps the jobs that other threads `put`. inbox: those that were not read yet."""

    def __init__(self, model: Model, stepper: Stepper, metrics: Metrics) -> None:
        self._world, self._pages = model.world, model.pages
        self._stepper, self._metrics = stepper, metrics
        self._inbox: SimpleQueue[Message] = SimpleQueue()
        self._waiting: deque[Job] = deque()
        self._alive: set[int] = set()
        """Jobs that wait or run."""
        self._leaves: list[int] = []
        limit = self._world.settings.world_limit / 4
        self._idle_seconds = min(MOST_IDLE_SECONDS, limit)

    def put(self, message: Message) -> None:
        """From any thread: for the next turn. Returns at once."""
        self._inbox.put(message)

    def run(self, deliver: Callable[[list[Progress]], None]) -> None:
        """Until `Ended`. deliver: called with what each step gives. Raises the error of
        a step, and that of the event loop."""
        end: Ended | None = None
        while end is None:
            end = self._receive()
            turn = Turn(is_last=True) if end is not None else self._choose()
            turn = share(self._world, turn)
            before = time.perf_counter()
            progress = self._stepper.run(turn)
            if self._stepper.num_running or progress:
                self._metrics.add_step(time.perf_counter() - before)
            self._alive.difference_update(p.number for p in progress if p.finish)
            self._measure()
            if progress:
                deliver(progress)
        if end.error is not None:
            raise end.error

    def _receive(self) -> Ended | None:
        """Read what has come; wait for it while there is nothing to step."""
        is_idle = not self._alive
        try:
            if is_idle:
                limit = self._idle_seconds if self._world.size > 1 else None
                message = self._inbox.get(timeout=limit)
            else:
                message = self._inbox.get_nowait()
            while True:
                if isinstance(message, Ended):
                    return message
                self._note(message)
                message = self._inbox.get_nowait()
        except Empty:
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

    def _measure(self) -> None:
        self._metrics.set_load(
            running=self._stepper.num_running,
            waiting=len(self._waiting),
            free_pages=self._pages.free_pages,
            drafts=self._stepper.num_drafts,
        )


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
