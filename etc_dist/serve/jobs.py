"""The messages between the threads of a server, and between its ranks."""

from __future__ import annotations

from dataclasses import dataclass, field

from etc_dist.models import Sampling


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


@dataclass(slots=True)
class Progress:
    """New ids of a job. logprobs: of each, if wanted. finish: "stop" or "length" with
    the last ones, "error" with an error. num_cached: tokens of the prompt that were
    in the cache before."""

    number: int
    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: str | None = None
    error: BaseException | None = None
    num_cached: int = 0


@dataclass(frozen=True)
class Ended:
    """The event loop has ended, with this error if it failed."""

    error: BaseException | None = None
