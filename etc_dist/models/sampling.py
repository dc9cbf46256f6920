"""How the next token of a request is chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from etc_dist.errors import ArgumentError, expect_range, expect_type
from etc_dist.functions.sample_column import NUMBERS, SCALE, SEED, TOP_K, TOP_P

Array = np.ndarray[Any, Any]
TEMPERATURES = (0.01, 100.0)
MOST_SEED = 2**64 - 1
LEAST_TOP_P = float(np.finfo(np.float32).tiny)
"""In fp32 a smaller one may be 0, for which no token is kept."""


@dataclass(frozen=True)
class Sampling:
    """A token is drawn from softmax(logits / temperature), or is the most likely one if
    temperature is 0.

    temperature: 0, or 0.01 to 100. top_k: keep only the top_k largest logits; 0: all.
    top_p: of these, keep only the most likely ones that together have this probability,
    above 0, at most 1. Logits equal to the smallest kept one are kept, too. seed: an
    integer from 0, below 2**64. The random numbers depend on it and on a token's
    position in its text, not on other requests.

    Raises ArgumentError for numbers out of range, TypeError for other types."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p"):
            expect_type(getattr(self, name), (int, float), name)
        expect_range(self.top_k, 0, 2**31 - 1, "top_k")
        expect_range(self.seed, 0, MOST_SEED, "seed")
        low, high = TEMPERATURES
        faults = []
        if not (self.temperature == 0 or low <= self.temperature <= high):
            wanted = f"a temperature of 0, or of {low} .. {high:g}"
            faults.append((wanted, f"temperature = {self.temperature}"))
        if not 0 < self.top_p <= 1:
            faults.append(("0 < top_p <= 1", f"top_p = {self.top_p}"))
        if faults:
            raise ArgumentError(
                "an argument is out of range",
                where="Sampling(...)",
                wanted="; ".join(wanted for wanted, _ in faults),
                got="; ".join(got for _, got in faults),
                fix="pass numbers in this range",
            )
        for name, value in vars(self).items():  # of NumPy's types, maybe
            kind = int if name in ("top_k", "seed") else float
            object.__setattr__(self, name, kind(value))

    @cached_property
    def numbers(self) -> tuple[int, ...]:
        """Internal: as `sample_column` reads them."""
        row = np.zeros(NUMBERS, np.uint32)
        if self.temperature > 0:
            top_p = max(self.top_p, LEAST_TOP_P)
            numbers = np.array([1 / self.temperature, top_p], np.float32)
            row[[SCALE, TOP_P]], row[TOP_K] = numbers.view(np.uint32), self.top_k
            row[SEED] = self.seed & 0xFFFFFFFF, self.seed >> 32
        return tuple(row.view(np.int32).tolist())


MOST_LIKELY = NUMBERS * (0,)


def row_sampling(rows: int, samplings: Sequence[Sampling | None]) -> Array:
    """`sampling` [rows, 5], int32, of `sample_column`. Rows with None or without an
    entry get the most likely token."""
    numbers = [MOST_LIKELY if entry is None else entry.numbers for entry in samplings]
    return np.array([*numbers, *(rows - len(samplings)) * [MOST_LIKELY]], np.int32)


def checked_sampling(samplings: Any, count: int, where: str) -> list[Sampling | None]:
    """A list of `count` entries of `samplings`: one for all, or a sequence of them.
    Raises TypeError for others, ArgumentError for another number of them."""
    if samplings is None or isinstance(samplings, Sampling):
        samplings = [samplings] * count
    expect_type(samplings, (list, tuple), "sampling")
    for entry in samplings:
        expect_type(entry, (Sampling, type(None)), "sampling")
    if len(samplings) != count:
        raise ArgumentError(
            "there is not one sampling for each",
            where=where,
            wanted=f"{count}, or one for all",
            got=str(len(samplings)),
            fix="pass a list of equal length",
        )
    return list(samplings)
