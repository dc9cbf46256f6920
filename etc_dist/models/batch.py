"""Requests that are decoded together, step by step."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from etc_dist.errors import ArgumentError, expect_range, expect_type
from etc_dist.ir.expr import is_integer
from etc_dist.models.rows import MOST_STOPS
from etc_dist.models.step_policy import step_counts

if TYPE_CHECKING:
    from etc_dist.models.model import Model


@dataclass(eq=False)
class Request:
    """tokens: the ids of a prompt, and those that were generated. cached: how many of
    them are in the cache. limit: the length at which it ends."""

    tokens: list[int]
    prompt_length: int
    limit: int
    stop: frozenset[int]
    number: int
    cached: int = 0
    is_done: bool = False

    @property
    def new_tokens(self) -> list[int]:
        """The generated ids, without the stop token."""
        return self.tokens[self.prompt_length :]


class Batch:
    """Requests of a model. Each step runs the positions that are not in the cache yet:
    one of each request that is being decoded, and parts of prompts. A context manager
    that frees the requests' pages."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._requests: list[Request] = []

    def __enter__(self) -> Batch:
        return self

    def __exit__(self, *_: object) -> None:
        for request in list(self._requests):
            self.remove(request)

    @property
    def is_done(self) -> bool:
        return all(request.is_done for request in self._requests)

    def add(
        self, prompt: Sequence[int], max_new_tokens: int | None, stop: Collection[int]
    ) -> Request:
        """max_new_tokens: None for as many as fit the model's positions. stop: ids that
        end the text.

        Raises ArgumentError for a prompt that is empty, has ids that the model does
        not know, or does not fit its positions, and if all requests are in use."""
        model = self._model
        ends = checked_stop(stop)
        tokens = checked_prompt(prompt, model.config.vocabulary)
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
        if not model.pages.free_requests:
            raise ArgumentError(
                "there are more requests than the model was loaded for",
                where=f"request {len(self._requests)} of a batch",
                wanted=f"at most {model.batch} requests at once",
                got="another one",
                fix="load the model with a larger batch=",
            )
        limit = model.positions if max_new_tokens is None else len(tokens) + count
        number = model.pages.add()
        request = Request(tokens, len(tokens), limit, ends, number)
        self._requests.append(request)
        return request

    def remove(self, request: Request) -> None:
        """Free the pages of a request, done or not. ValueError if it is not in here."""
        if request not in self._requests:
            raise ValueError("the request is not in this batch, or was removed")
        self._requests.remove(request)
        self._model.pages.remove(request.number)

    def step(self) -> list[Request]:
        """Run one step, or several if all requests are being decoded; returns the
        requests that have new tokens, or have ended."""
        parts = self._choose()
        steps = self._choose_steps(parts)
        ids: list[int] = []
        numbers: list[int] = []
        positions: list[int] = []
        ends: list[int] = []
        for request, count in parts:
            span = range(request.cached, request.cached + count)
            ids += request.tokens[span.start : span.stop]
            numbers += [request.number] * count
            positions += span
            ends += [position + 1 for position in span]
            ends[-1] = min(span.stop + steps - 1, max(span.stop, request.limit - 1))
            self._model.pages.extend(request.number, ends[-1])
        stops = [request.stop for request, count in parts for _ in range(count)]
        table = self._model.pages.table
        found = self._model.steps(
            *(ids, numbers, positions, table),
            count=steps,
            ends=ends,
            stops=stops if steps > 1 else None,
        )
        changed, end = [], 0
        for request, count in parts:
            request.cached, end = request.cached + count, end + count
            if request.cached == len(request.tokens):
                tokens = found[:, end - 1]
                _extend(request, tokens[tokens >= 0].tolist())
                changed.append(request)
        return changed

    def _choose_steps(self, parts: Sequence[tuple[Request, int]]) -> int:
        """At most as many as some request needs."""
        most = self._model.steps_per_launch
        for request, count in parts:
            is_decoded = count == 1 and request.cached + 1 == len(request.tokens)
            if not is_decoded or len(request.stop) > MOST_STOPS:
                return 1
        needed = max((r.limit - len(r.tokens) for r, _ in parts), default=1)
        return max(n for n in step_counts(most) if n <= needed)

    def _choose(self) -> list[tuple[Request, int]]:
        """The requests of the next step, and the number of positions of each. Those
        with the fewest come first, so that prompts do not delay the others."""
        pending = [
            (len(request.tokens) - request.cached, request)
            for request in self._requests
            if not request.is_done
        ]
        pending.sort(key=lambda pair: pair[0])
        parts, left = [], self._model.most_rows
        for length, request in pending:
            if left:
                count = min(length, left)
                parts.append((request, count))
                left -= count
        return parts


def _extend(request: Request, tokens: Sequence[int]) -> None:
    """Adds tokens, of which only the last may be a stop token."""
    request.cached += len(tokens) - 1
    for token in tokens:
        if token in request.stop:
            request.is_done = True
        else:
            request.tokens.append(token)
            request.is_done = len(request.tokens) == request.limit


def checked_stop(stop: Any) -> frozenset[int]:
    """Ids that end a text. TypeError unless they are a collection of integers."""
    if isinstance(stop, (str, bytes)) or not isinstance(stop, Iterable):
        raise TypeError(f"stop expects a list of ids, got {type(stop).__name__}")
    ends = list(stop)
    for token in ends:
        if not is_integer(token):
            raise TypeError(f"stop expects ids, got {type(token).__name__}")
    return frozenset(map(int, ends))


def checked_prompt(prompt: Any, vocabulary: int) -> list[int]:
    """The ids of a prompt as integers."""
    expect_type(prompt, (list, tuple, np.ndarray), "a prompt")
    tokens = []
    for token in prompt:
        if not is_integer(token):
            raise TypeError(f"a token expects an int, got {type(token).__name__}")
        tokens.append(int(token))
    wrong = [token for token in tokens if not 0 <= token < vocabulary]
    if wrong or not tokens:
        raise ArgumentError(
            "a prompt cannot be read",
            where=f"a prompt of {len(tokens)} tokens",
            wanted=f"one token or more, ids of 0 .. {vocabulary - 1}",
            got=f"id {wrong[0]}" if wrong else "an empty prompt",
            fix="use the tokenizer of this model",
        )
    return tokens
