"""Token ids that callers give: lists, or arrays of NumPy, CuPy or torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from etc_dist.errors import ArgumentError, expect_type

MOST_IDS = 2**32
"""That a tokenizer can have."""


def plain(value: Any) -> Any:
    """An array or a number of NumPy, CuPy or torch as Python's; others as they are."""
    return value.tolist() if hasattr(value, "tolist") else value


def checked_stop(stop: Any, vocabulary: int) -> frozenset[int]:
    """Ids that end a text. TypeError unless they are a collection of integers,
    ArgumentError for ids outside of the vocabulary."""
    values = plain(stop)
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise TypeError(f"stop expects a list of ids, got {type(stop).__name__}")
    ends = list(map(plain, values))
    for token in ends:
        expect_type(token, int, "each of stop")
        if not 0 <= token < vocabulary:
            raise ArgumentError(
                "a stop token does not exist",
                where="stop=",
                wanted=f"ids of 0 .. {vocabulary - 1}",
                got=f"id {token}",
                fix="use the tokenizer of this model",
            )
    return frozenset(ends)


def checked_prompt(prompt: Any, vocabulary: int) -> list[int]:
    """The ids of a prompt as integers. Raises TypeError for others than integers,
    ArgumentError for ids outside of the vocabulary and for no ids."""
    values = plain(prompt)
    expect_type(values, (list, tuple), "a prompt")
    tokens = list(map(plain, values))
    for token in tokens:
        expect_type(token, int, "a token")
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


def checked_ids(ids: Iterable[int]) -> list[int]:
    """Ids for a tokenizer; TypeError unless all are integers from 0."""
    numbers = list(map(plain, plain(ids)))
    for number in numbers:
        if type(number) is not int or not 0 <= number < MOST_IDS:
            raise TypeError(f"ids of tokens are integers from 0, got {number!r}")
    return numbers
