"""Tokens that may follow a text, by what followed its last tokens earlier in it.

Prompt lookup decoding (Saxena, 2023): no further model is needed, and texts that repeat
themselves or their prompts, such as code and summaries, have many such tokens."""

from __future__ import annotations

from collections.abc import Sequence

LENGTHS = (3, 2)
"""Of the last tokens that are looked up: the longer ones first. One token alone is
followed by too many others."""
MOST_READ = 2**14
"""Of a prompt, the last tokens that are looked through."""
MOST_DRAFTS = 32
"""Of a request in a step."""


class Drafts:
    """The places of a text where its last tokens were before. The text only grows; each
    of its tokens is read once."""

    def __init__(self) -> None:
        self._ends: dict[tuple[int, ...], int] = {}
        """By tokens, the place that follows them: that of the last time, but for the
        end of the text."""
        self._num_read = 0

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        """Up to `count` tokens that may follow `tokens`; often none."""
        first = max(self._num_read, len(tokens) - MOST_READ)
        for end in range(first, len(tokens)):
            for length in LENGTHS:
                if length <= end:
                    self._ends[tuple(tokens[end - length : end])] = end
        self._num_read = len(tokens)
        for length in LENGTHS:
            begin = self._ends.get(tuple(tokens[-length:]))
            if begin is not None:
                return list(tokens[begin : begin + count])
        return []
