"""The values of `deterministic`, the guarantee about the bits of results."""

from __future__ import annotations

from typing import Any

from etc_dist.errors import expect_choice

BATCH = "batch"
"""A row of x has the same bits of its result for any number of rows."""
GUARANTEES = ("run", BATCH)
"""The first one, the same bits on every run, always holds."""


def check_deterministic(value: Any) -> None:
    """Raise TypeError or ArgumentError for a value that `deterministic` does not
    have."""
    expect_choice(value, GUARANTEES, "deterministic")
