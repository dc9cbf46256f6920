"""The owner of the batch: the same calls on every rank."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from etc_dist.errors import NotFiniteError
from etc_dist.models import Batch, Model, Request
from etc_dist.models.prefixes import PageKeys
from etc_dist.serve.jobs import Job, Progress, TokenLogprobs, Turn
from etc_dist.serve.logprobs import find_logprobs
from etc_dist.serve.request_fields import BadRequest


@dataclass(eq=False)
class Running:
    """A job in the batch. num_taken: ids that `take_new` has returned."""

    job: Job
    request: Request
    num_taken: int = 0

    @property
    def finish(self) -> str | None:
        """Why the text has ended, or None."""
        if not self.request.is_done:
            return None
        is_full = len(self.request.tokens) == self.request.limit
        return "length" if is_full else "stop"

    def take_new(self) -> list[int]:
        """The ids since the last call."""
        new = self.request.tokens[self.request.prompt_length + self.num_taken :]
        self.num_taken += len(new)
        return new


class Stepper:
    """The jobs that are generated together. All ranks call `run` with equal turns."""

    def __init__(self, model: Model, *, reuse: bool) -> None:
        """reuse: as of `Batch`."""
        self._model = model
        self._batch = Batch(model, reuse=reuse)
        self._running: dict[int, Running] = {}
        self._of_requests: dict[Request, Running] = {}
        self._keys = 0, PageKeys(model.pages.page_size)
        """Of a waiting job, and its number."""

    @property
    def num_drafts(self) -> tuple[int, int]:
        """The drafts of tokens so far, and those of them that were accepted."""
        return self._batch.num_drafted, self._batch.num_accepted

    @property
    def num_running(self) -> int:
        """The jobs in the batch."""
        return len(self._running)

    def admit(self, waiting: deque[Job]) -> list[Job]:
        """Takes from the left the jobs for which there are places and pages."""
        pages = self._model.pages
        num_places, num_pages = pages.free_requests, pages.free_pages
        joins = []
        while waiting and num_places:
            num_needed = pages.needed(waiting[0].length)
            if num_needed > num_pages:
                prefix = self._batch.prefix(
                    waiting[0].prompt, self._keys_of(waiting[0])
                )
                num_needed = pages.needed(waiting[0].length, prefix)
            if num_needed > num_pages:
                break
            num_places -= 1
            num_pages -= num_needed
            joins.append(waiting.popleft())
        return joins

    def _keys_of(self, job: Job) -> PageKeys:
        if job.number != self._keys[0]:
            self._keys = job.number, PageKeys(self._model.pages.page_size)
        return self._keys[1]

    def run(self, turn: Turn) -> list[Progress]:
        """What the turn gives. Collective. A job whose logits are not finite ends with
        an error, and the others continue; other errors are raised."""
        for number in turn.leaves:
            self._batch.remove(self._pop(number).request)
        for job in turn.joins:
            request = self._batch.add(
                job.prompt,
                max_new_tokens=job.max_new_tokens,
                stop=job.stop,
                sampling=job.sampling,
            )
            text = self._running[job.number] = Running(job, request)
            self._of_requests[request] = text
        if not self._running:
            return []
        try:
            return self._collect(self._batch.step())
        except NotFiniteError as error:
            return self._fail(error)

    def _pop(self, number: int) -> Running:
        text = self._running.pop(number)
        del self._of_requests[text.request]
        return text

    def _fail(self, error: NotFiniteError) -> list[Progress]:
        failed = [
            number
            for number, text in self._running.items()
            if text.request.number in error.requests
        ]
        for number in failed:
            self._batch.remove(self._pop(number).request)
        refusal = BadRequest(f"{type(error).__name__}: {error}", status=500)
        return [Progress(number, finish="error", error=refusal) for number in failed]

    def _collect(self, requests: Sequence[Request]) -> list[Progress]:
        """The news of these requests; those that have ended stop running."""
        running = map(self._of_requests.__getitem__, requests)
        news = [(text, text.take_new()) for text in running]
        of_jobs = self._find_logprobs(news)
        progress = []
        for text, ids in news:
            number, finish = text.job.number, text.finish
            if finish is not None:
                self._pop(number)
            logprobs = of_jobs.get(number, ())
            num_cached = text.request.reused
            progress.append(
                Progress(number, ids, logprobs, finish, num_cached=num_cached)
            )
        return progress

    def _find_logprobs(
        self, news: Sequence[tuple[Running, list[int]]]
    ) -> dict[int, list[TokenLogprobs]]:
        """By job, those of its new ids, where they are wanted. Collective if any
        are."""
        rows: list[int] = []
        ids: list[int] = []
        counts: list[int] = []
        numbers: list[int] = []
        for text, new in news:
            if text.job.num_logprobs is not None:
                # A stop token, which is not among the ids, has the last row.
                last = text.request.row - (text.finish == "stop")
                rows += range(last + 1 - len(new), last + 1)
                ids += new
                counts += [text.job.num_logprobs] * len(new)
                numbers += [text.job.number] * len(new)
        of_jobs: dict[int, list[TokenLogprobs]] = {}
        if rows:
            of_rows = find_logprobs(self._model, rows, ids, counts)
            for number, logprobs in zip(numbers, of_rows, strict=True):
                of_jobs.setdefault(number, []).append(logprobs)
        return of_jobs

    def close(self) -> None:
        """End all jobs, and free their pages."""
        for text in self._running.values():
            self._batch.remove(text.request)
        self._running.clear()
        self._of_requests.clear()
