"""The text of a job's ids, up to a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from etc_dist.models import TextStream
from etc_dist.models.tokenizer import Tokenizer
from etc_dist.serve.jobs import Progress, TokenLogprobs


@dataclass
class Delta:
    """What some ids add to an answer. tokens: ids with their logprobs, if wanted.
    finish: why the text has ended, or None."""

    text: str = ""
    tokens: list[tuple[int, TokenLogprobs]] = field(default_factory=list)
    finish: str | None = None


class AnswerText:
    """The text of a job, without the stop string that ends it. What may be the
    beginning of one is held until that is known. num_ids: ids that were taken, up to
    the one that completed a stop string. finish: as that of the last delta."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self._stream, self._stops = TextStream(tokenizer), stops
        self._held_text = ""
        self.num_ids = 0
        self.finish: str | None = None

    def take(self, progress: Progress) -> Delta:
        """What a step has added."""
        texts: list[str] = []
        tokens: list[tuple[int, TokenLogprobs]] = []
        for number, logprobs in zip(
            progress.ids, progress.logprobs or len(progress.ids) * [None], strict=True
        ):
            self.num_ids += 1
            if logprobs is not None:
                tokens.append((number, logprobs))
            texts.append(self._release(self._stream.add([number])))
            if self.finish is not None:
                break
        if self.finish is None and progress.finish is not None:
            texts += [self._release(self._stream.end()), self._held_text]
            self.finish = self.finish or progress.finish
        return Delta("".join(texts), tokens, self.finish)

    def _release(self, new: str) -> str:
        """The text that may be sent; sets `finish` at a stop string."""
        text = self._held_text + new
        places = [text.find(stop) for stop in self._stops]
        end = min((place for place in places if place >= 0), default=None)
        if end is not None:
            self.finish, self._held_text = "stop", ""
            return text[:end]
        num_held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held_text = text[len(text) - num_held :]
        return text[: len(text) - num_held]


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that begins `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if stop.startswith(text[-n:])), 0)
