"""Requests that are decoded together, step by step."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from etc_dist.errors import ArgumentError, NotFiniteError, expect_range
from etc_dist.models.drafts import Drafts
from etc_dist.models.ids import checked_prompt, checked_stop
from etc_dist.models.prefixes import PageKeys
from etc_dist.models.rows import MOST_STOPS
from etc_dist.models.sampling import Sampling, checked_sampling
from etc_dist.models.step_policy import MOST_REQUESTS, step_counts

if TYPE_CHECKING:
    from etc_dist.models.model import Model


@dataclass(eq=False)
class Request:
    """A request of a batch; made by `Batch.add`.

    tokens: the ids of its prompt, then the generated ones. cached: how many of them are
    in the cache. limit: the length at which it ends, its prompt included. stop: the ids
    that end it. number: its row of the page table, which later requests reuse. row: of
    the last step that gave it an id, that of `Model.logits`. is_done: whether it
    has ended. reused: positions of the prompt that were in the cache before. keys,
    num_kept: of its pages, and how many of them later requests can find. drafts: what
    may follow its tokens."""

    tokens: list[int]
    prompt_length: int
    limit: int
    stop: frozenset[int]
    number: int
    sampling: Sampling | None = None
    cached: int = 0
    row: int = 0
    is_done: bool = False
    reused: int = 0
    keys: PageKeys | None = field(default=None, repr=False)
    num_kept: int = 0
    drafts: Drafts = field(default_factory=Drafts, repr=False)

    @property
    def new_tokens(self) -> list[int]:
        """The generated ids, without the stop token."""
        return self.tokens[self.prompt_length :]


StepPart = tuple[Request, int, Sequence[int]]
"""What a step runs of a request: how many of its tokens that are not in the cache yet,
and then drafts of tokens that may follow."""


class Batch:
    """Requests of a model, which join and leave between steps: continuous batching. A
    step runs positions that are not in the cache yet: one of each request that is being
    decoded, and parts of prompts. A context manager, which ends all requests. Those of
    a batch that all ranks have dropped end where `add` needs their place.

    reuse: requests begin with the pages of others, running or ended, that hold the same
    ids: full pages of equal first tokens, of whose prompt at least one token is left.

    With `load(..., speculate=n)`, a step also runs up to n drafts of a request's next
    tokens, and keeps those that the model chooses. num_drafted, num_accepted: all such
    drafts, and those that were kept.

    Requests do not change each other's ids, with one exception: a matmul may round
    differently with another number of rows, which matters if two logits are almost
    equal. With `deterministic="batch"` there is no exception."""

    def __init__(self, model: Model, *, reuse: bool = False) -> None:
        self._model, self._reuses = model, reuse
        self._requests: list[Request] = []
        self.num_drafted = self.num_accepted = 0

    def __enter__(self) -> Batch:
        return self

    def __exit__(self, *_: object) -> None:
        for request in list(self._requests):
            self.remove(request)

    @property
    def is_done(self) -> bool:
        """Whether all requests have ended."""
        return all(request.is_done for request in self._requests)

    def add(
        self,
        prompt: Sequence[int],
        *,
        max_new_tokens: int | None = None,
        stop: Collection[int] | None = None,
        sampling: Sampling | None = None,
    ) -> Request:
        """Adds a request, and reserves its pages until it ends or is removed. Options:
        as of `Model.generate`.

        Raises ArgumentError for a prompt that is empty, has ids outside the vocabulary
        or does not fit the positions, and if no place or too few pages are free."""
        model = self._model
        vocabulary = model.config.vocabulary
        if stop is None:  # no row has an id outside of the vocabulary
            stop = [n for n in model.config.stop_tokens if n < vocabulary]
        ends = checked_stop(stop, vocabulary)
        (request_sampling,) = checked_sampling(sampling, 1, "batch.add")
        tokens = checked_prompt(prompt, vocabulary)
        count = 1
        if max_new_tokens is not None:
            count = expect_range(max_new_tokens, 1, None, "max_new_tokens")
        if len(tokens) + count > model.positions:
            raise ArgumentError(
                "a request is longer than the model's cache",
                where=f"a prompt of {len(tokens)} tokens",
                wanted=f"at most {model.positions} positions",
                got=f"{len(tokens)} + {count} new tokens",
                fix="load the model with more positions=, or generate fewer tokens",
            )
        limit = model.positions if max_new_tokens is None else len(tokens) + count
        if not self._fits(limit):
            self._reclaim()
        keys = PageKeys(model.pages.page_size)
        prefix = self.prefix(tokens, keys)
        number = model.pages.add(limit, self, prefix)
        request = Request(tokens, len(tokens), limit, ends, number, request_sampling)
        if self._reuses:
            request.keys, request.num_kept = keys, len(prefix)
            request.reused = request.cached = len(prefix) * model.pages.page_size
        self._requests.append(request)
        return request

    def prefix(self, prompt: Sequence[int], keys: PageKeys) -> list[int]:
        """The pages with which a request with this prompt begins; none without
        `reuse`. keys: of the prompt."""
        if not self._reuses:
            return []
        pages = self._model.pages
        # The id that follows the prompt is found by a step of its last token.
        return pages.find(keys.of(prompt, (len(prompt) - 1) // pages.page_size))

    def has_room(self, length: int | None = None) -> bool:
        """Whether `add` has a free place and pages for a request of up to `length`
        tokens, its prompt included, that shares none; default: the positions of the
        model."""
        limit = self._model.positions
        if length is not None:
            limit = expect_range(length, 1, None, "length")
        if self._model.world.size == 1 and not self._fits(limit):
            self._reclaim()
        return self._fits(limit)

    def _fits(self, limit: int) -> bool:
        pages = self._model.pages
        return pages.free_requests > 0 and pages.needed(limit) <= pages.free_pages

    def _reclaim(self) -> None:
        """Free the requests of dropped batches. Collective; it makes the ranks agree on
        them, as they collect garbage at different times."""
        pages, world = self._model.pages, self._model.world
        numbers = [set(n) for n in world.agree(pages.ownerless)]
        if world.size == 1:  # after an interrupt, the table has more than the batch
            batch_numbers = {request.number for request in self._requests}
            numbers[0].update(set(pages.owned(self)) - batch_numbers)
        for number in sorted(set.intersection(*numbers)):
            pages.remove(number)

    def remove(self, request: Request) -> None:
        """End a request, and free its pages. ValueError if it has ended before."""
        if request not in self._requests:
            raise ValueError("the request has ended, or is not in this batch")
        self._requests.remove(request)
        self._model.pages.remove(request.number)

    def step(self) -> list[Request]:
        """Runs one step, or several in one launch if all requests are being decoded.
        Returns the requests with new tokens or that have ended; the latter leave the
        batch. While prompts are processed the list may be empty.

        Raises ArgumentError for a batch without requests. After a NotFiniteError the
        requests have the state from before the step. Remove those in its `requests` to
        continue the others."""
        for request in [r for r in self._requests if r.is_done]:
            self.remove(request)  # a step before was interrupted
        parts = self._choose()
        if self._model.speculate:
            try:
                return self._run(self._with_drafts(parts))
            except NotFiniteError:
                pass  # maybe of a draft that the model does not choose
        return self._run(parts)

    def _run(self, parts: Sequence[StepPart]) -> list[Request]:
        num_steps = self._choose_steps(parts)
        ids: list[int] = []
        numbers: list[int] = []
        positions: list[int] = []
        ends: list[int] = []
        of_rows: list[Request] = []
        # Last come the rows whose next ids are known, or are not needed yet.
        later_spans: list[tuple[Request, range]] = []
        for request, count, drafts in parts:
            first = min(request.cached + count, len(request.tokens) - 1)
            if first > request.cached:
                later_spans.append((request, range(request.cached, first)))
            if first < request.cached + count:
                end = first + 1 + len(drafts)
                ids += [request.tokens[first], *drafts]
                numbers += [request.number] * (end - first)
                positions += range(first, end)
                ends += range(first + 1, end)
                ends.append(min(end + num_steps - 1, max(end, request.limit - 1)))
                of_rows += [request] * (end - first)
        sampling = [request.sampling for request in of_rows]
        num_needed = len(ids)
        for request, span in later_spans:
            ids += request.tokens[span.start : span.stop]
            numbers += [request.number] * len(span)
            positions += span
            ends += range(span.start + 1, span.stop + 1)
        sampling += [None] * (len(ids) - num_needed)
        table = self._model.pages.table
        with self._model.world.exclusive:  # so that an interrupt leaves no half step
            new_ids = self._model.steps(
                ids,
                numbers,
                positions,
                table,
                count=num_steps,
                ends=ends,
                stops=[request.stop for request in of_rows] if num_steps > 1 else None,
                sampling=sampling if any(sampling) else None,
                outputs=max(1, num_needed),
            )
            return self._add(parts, new_ids)

    def _add(self, parts: Sequence[StepPart], ids: Any) -> list[Request]:
        """Adds the ids of a step. Returns the requests that have new ones."""
        # NOTE: a step takes microseconds: few operations for each request.
        extended_requests, end = [], 0
        of_rows = ids[0].tolist()
        for request, count, drafts in parts:
            num_cached = request.cached + count
            has_id = num_cached == len(request.tokens)
            if has_id:
                row, end = end, end + 1 + len(drafts)
                if drafts:
                    tokens = _accepted(of_rows[row:end], drafts, request.stop)
                    self.num_drafted += len(drafts)
                    self.num_accepted += len(tokens) - 1
                    row += len(tokens) - 1
                elif len(ids) == 1:
                    tokens = [of_rows[row]]
                else:
                    tokens = [token for token in ids[:, row].tolist() if token >= 0]
                _extend(request, tokens)
                request.row = row
                num_cached += len(tokens) - 1
                extended_requests.append(request)
            request.cached = num_cached
            # NOTE: before, nothing says that its numbers are finite. In blocks of rows,
            # those that are not reach earlier positions, also of pages before.
            if has_id and request.keys is not None:
                self._keep(request)
            if request.is_done and request in self._requests:
                self.remove(request)
        return extended_requests

    def _keep(self, request: Request) -> None:
        """Let other requests find the pages that a step has filled."""
        count = request.cached // self._model.pages.page_size
        if request.keys is None or count == request.num_kept:
            return
        if request in self._requests:  # else it was removed during the step
            first, keys = request.num_kept, request.keys.of(request.tokens, count)
            self._model.pages.keep(request.number, first, keys[first:])
            request.num_kept = count

    def _choose_steps(self, parts: Sequence[StepPart]) -> int:
        """The steps of the next launch: no more than any request needs."""
        most = self._model.steps_per_launch
        for request, count, _ in parts:
            is_decoded = count == 1 and request.cached + 1 == len(request.tokens)
            if not is_decoded or len(request.stop) > MOST_STOPS:
                return 1
        num_needed = max((r.limit - len(r.tokens) for r, _, _ in parts), default=1)
        return max(n for n in step_counts(most) if n <= num_needed)

    def _choose(self) -> list[StepPart]:
        """The requests of the next step, and the number of positions of each. Those
        with the fewest come first, so that prompts do not delay decoding, and that the
        rows of prompts are the last ones, which are attended in blocks."""
        pending = [
            (len(request.tokens) - request.cached, request)
            for request in self._requests
        ]
        pending.sort(key=lambda pair: pair[0])
        parts: list[StepPart] = []
        num_free_rows = self._model.most_rows
        for length, request in pending:
            if num_free_rows:
                count = min(length, num_free_rows)
                parts.append((request, count, ()))
                num_free_rows -= count
        return sorted(parts, key=lambda part: part[1])

    def _with_drafts(self, parts: Sequence[StepPart]) -> list[StepPart]:
        """The parts, with drafts of what may follow, if the step has few rows."""
        most_rows = min(MOST_REQUESTS, self._model.most_rows)
        num_free_rows = most_rows - sum(count for _, count, _ in parts)
        with_drafts: list[StepPart] = []
        for request, count, _ in parts:
            # The id after the last one is the last of the request.
            num_new = request.limit - len(request.tokens) - 1
            most = min(self._model.speculate, num_free_rows, num_new)
            drafts: list[int] = []
            if most > 0 and request.cached + count == len(request.tokens):
                drafts = request.drafts.propose(request.tokens, most)
            num_free_rows -= len(drafts)
            with_drafts.append((request, count, drafts))
        return with_drafts


def _accepted(
    ids: Sequence[int], drafts: Sequence[int], stop: Collection[int]
) -> list[int]:
    """The ids of a request's last rows that follow each other. ids: those that the
    model chose after a token and after each draft; a draft that is not the id before it
    ends them."""
    accepted = [ids[0]]
    for draft, following in zip(drafts, ids[1:], strict=True):
        if accepted[-1] != draft or draft in stop:
            break
        accepted.append(following)
    return accepted


def _extend(request: Request, tokens: Sequence[int]) -> None:
    """Adds tokens, of which only the last may be a stop token."""
    for token in tokens:
        if token in request.stop:
            request.is_done = True
        else:
            request.tokens.append(token)
            request.is_done = len(request.tokens) == request.limit
