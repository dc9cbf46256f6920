"""The messages between the processes of a server, and between its ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from etc_dist.models import ModelConfig, Sampling
from etc_dist.models.tokenizer import Tokenizer
from etc_dist.serve.request_fields import BadRequest


@dataclass(frozen=True)
class Job:
    """A text to generate. number: its own among all of a server. stop: ids that end it.
    num_logprobs: the number of the most likely tokens at each place that are reported
    in addition to the chosen one; None: no probabilities."""

    number: int
    prompt: list[int]
    max_new_tokens: int
    stop: frozenset[int]
    sampling: Sampling | None
    num_logprobs: int | None = None

    @property
    def length(self) -> int:
        """The positions that it may take."""
        return len(self.prompt) + self.max_new_tokens


@dataclass(frozen=True)
class Turn:
    """What all ranks do next: jobs join, the numbered ones leave, and a step runs if
    any is left. is_last: nothing more follows."""

    joins: tuple[Job, ...] = ()
    leaves: tuple[int, ...] = ()
    is_last: bool = False


@dataclass(frozen=True)
class TokenLogprobs:
    """The natural logarithm of a chosen token's probability, and the most likely tokens
    with theirs, in descending order; before temperature, top_k and top_p."""

    own_logprob: float
    most_likely: tuple[tuple[int, float], ...] = ()


class Progress(NamedTuple):
    """New ids of a job. logprobs: of each, if wanted. finish: "stop" or "length" with
    the last ones, "error" with an error. num_cached: tokens of the prompt that were
    in the cache before."""

    # NOTE: a tuple, which is sent in less time than a dataclass.

    number: int
    ids: Sequence[int] = ()
    logprobs: Sequence[TokenLogprobs] = ()
    finish: str | None = None
    error: BadRequest | None = None
    num_cached: int = 0


@dataclass(frozen=True)
class Served:
    """What is served. name: of the model. positions: of a text, its prompt included.
    num_pages: of the cache. has_logprobs: whether a launch has the logits of all its
    ids. most_bytes: of the body of a request."""

    name: str
    config: ModelConfig
    tokenizer: Tokenizer
    positions: int
    num_pages: int
    has_logprobs: bool
    most_bytes: int


@dataclass(frozen=True)
class Ready:
    """The HTTP server takes requests, or cannot listen, by this error."""

    error: str = ""


@dataclass(frozen=True)
class TurnReport:
    """What a turn gave. step_seconds: None if no step has run. drafts: all so far, and
    those that were accepted."""

    progress: Sequence[Progress]
    step_seconds: float | None
    num_running: int
    num_waiting: int
    num_free_pages: int
    drafts: tuple[int, int]


@dataclass(frozen=True)
class Failure:
    """A step has failed: all requests are answered by this error."""

    text: str


@dataclass(frozen=True)
class Ended:
    """The event loop has ended, with this error if it failed."""

    error: BaseException | None = None


Message = Job | int | Ended
"""A job that begins, the number of one whose client has left, or the end."""
