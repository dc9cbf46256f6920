"""The values of `deterministic`, the guarantee about the bits of results."""

from __future__ import annotations

from typing import Any

from etc_dist.errors import ArgumentError, expect_type

BATCH = "batch"
"""A row of x has the same bits of its result for any number of rows."""
GUARANTEES = ("run", BATCH)
"""The first one, the same bits on every run, always holds."""


def check_deterministic(value: Any) -> None:
    """Raise TypeError or ArgumentError for a value that `deterministic` does not
    have."""
    expect_type(value, str, "deterministic")
    if value not in GUARANTEES:
        raise ArgumentError(
            "unknown guarantee about the bits of results",
            where="argument deterministic",
            wanted=" or ".join(map(repr, GUARANTEES)),
            got=f"deterministic = {value!r}",
            fix="choose one of these",
        )
