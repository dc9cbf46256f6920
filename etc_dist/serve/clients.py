"""The jobs of the clients that are connected. All of it runs in the event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from etc_dist.serve.jobs import Job, Progress, TurnReport
from etc_dist.serve.metrics import Metrics
from etc_dist.serve.request_fields import BadRequest

MOST_TEXTS_WAITING = 4096
"""Of all clients; more are refused."""
BODY_SECONDS = 60.0
"""In which the body of a request has to come."""


class RequestJobs:
    """The jobs of one request. Close it when the client has its answer, or has left:
    jobs that have not ended leave the batch."""

    def __init__(self, clients: Clients, jobs: Sequence[Job]) -> None:
        self._clients = clients
        self._idx_of = {job.number: job_idx for job_idx, job in enumerate(jobs)}
        self._jobs = {job.number: job for job in jobs}
        self._times = dict.fromkeys(self._jobs, time.perf_counter())
        self._begun_numbers: set[int] = set()
        self.queue: asyncio.Queue[Progress] = asyncio.Queue()

    @property
    def is_done(self) -> bool:
        """Whether all jobs have ended."""
        return not self._jobs

    async def next(self) -> tuple[int, Progress]:
        """The news of a job, and its place among those of the request. BadRequest if it
        has failed."""
        progress = await self.queue.get()
        number = progress.number
        error = progress.error
        if error is not None:
            self._end(number, "error")
            self._clients.leave(number)
            raise error
        if number in self._jobs:
            self._measure(number, progress)
        if progress.finish is not None:
            self._end(number, progress.finish)
        return self._idx_of[number], progress

    def stop(self, idx: int) -> None:
        """End a job at a stop string."""
        for number, job_idx in self._idx_of.items():
            if job_idx == idx and number in self._jobs:
                self._end(number, "stop")
                self._clients.leave(number)

    def close(self) -> None:
        """End all jobs."""
        for number in list(self._jobs):
            self._end(number, "left")
            self._clients.leave(number)

    def _measure(self, number: int, progress: Progress) -> None:
        metrics, now = self._clients.metrics, time.perf_counter()
        seconds, self._times[number] = now - self._times[number], now
        num_ids = len(progress.ids)
        if number not in self._begun_numbers:
            self._begun_numbers.add(number)
            metrics.add_seconds("first_token_seconds", seconds)
            num_tokens = len(self._jobs[number].prompt)
            metrics.add_prompt(num_tokens, progress.num_cached)
        elif num_ids:
            metrics.add_seconds("token_seconds", seconds / num_ids)
        metrics.add_tokens(num_ids)

    def _end(self, number: int, reason: str) -> None:
        if self._jobs.pop(number, None) is not None:
            self._clients.metrics.add_end(reason)
            self._clients.forget(number)


class Clients:
    """All requests that are answered. put: gives a job, or the number of one that
    leaves, to the engine."""

    def __init__(self, put: Callable[[Any], None], metrics: Metrics) -> None:
        self._put, self.metrics = put, metrics
        self._exchanges: dict[int, RequestJobs] = {}
        self._bodies: set[asyncio.Timeout] = set()
        self._count = 0
        self.why_closed: str | None = None
        """Why no request is taken."""

    def next_number(self) -> int:
        """The number of a new job."""
        self._count += 1
        return self._count

    @asynccontextmanager
    async def receiving(self) -> AsyncIterator[None]:
        """While the body of a request comes. BadRequest if that takes too long, or once
        no more requests are taken."""
        self._expect_open()
        try:
            async with asyncio.timeout(BODY_SECONDS) as limit:
                self._bodies.add(limit)
                yield
        except TimeoutError as error:
            self._expect_open()
            text = f"the body did not come within {BODY_SECONDS:g} s"
            raise BadRequest(text, status=408) from error
        finally:
            self._bodies.discard(limit)

    def end_bodies(self) -> None:
        """Refuse the requests whose bodies have not come."""
        for limit in self._bodies:
            if not limit.expired():
                limit.reschedule(0)

    def begin(self, jobs: Sequence[Job]) -> RequestJobs:
        """Give jobs to the engine. BadRequest if no more are taken."""
        self._expect_open()
        if len(self._exchanges) + len(jobs) > MOST_TEXTS_WAITING:
            text = f"the server has {len(self._exchanges)} texts to generate already"
            raise BadRequest(text, status=503)
        exchange = RequestJobs(self, jobs)
        for job in jobs:
            self._exchanges[job.number] = exchange
            self._put(job)
        return exchange

    def deliver(self, report: TurnReport) -> None:
        """What a turn gave."""
        self.metrics.add_turn(report)
        self._give(report.progress)

    def _give(self, news: Iterable[Progress]) -> None:
        for progress in news:
            exchange = self._exchanges.get(progress.number)
            if exchange is not None:  # else its client has left
                exchange.queue.put_nowait(progress)

    def fail(self, error: BadRequest) -> None:
        """Answer all requests by this error, and take no more."""
        self.why_closed = self.why_closed or "has ended with an error"
        self.end_bodies()
        failed = list(self._exchanges)
        self._give(Progress(number, finish="error", error=error) for number in failed)

    def _expect_open(self) -> None:
        if self.why_closed is not None:
            raise BadRequest(f"the server {self.why_closed}", status=503)

    def leave(self, number: int) -> None:
        """A job is not wanted any more."""
        self._put(number)

    def forget(self, number: int) -> None:
        """A job has ended."""
        with suppress(KeyError):
            del self._exchanges[number]
