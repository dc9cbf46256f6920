"""Addresses in the emulator's reports."""

from __future__ import annotations

import pytest

from etc_dist.emulate.places import NEAR, Place, with_names

PLACES = [
    Place("x of rank 0", 4096, 24, (2, 3), 4),
    Place("x of rank 1", 8192, 24, (2, 3), 4),
    Place("the events of rank 0", 1 << 20, 64),
]


@pytest.mark.parametrize(
    ("address", "text"),
    [
        (4096, "x[0, 0] of rank 0"),
        (8192 + 19, "x[1, 1] of rank 1"),
        (4096 + 24, "0 bytes after the end of x of rank 0"),
        (8192 - 4, "4 bytes before x of rank 1"),
        ((1 << 20) + 8, "the events of rank 0"),
        ((1 << 20) + 64 + NEAR, "far from all of them"),
    ],
)
def test_an_address_is_described_by_the_array_at_it(address, text):
    report = f"a data race at @{address:x}: written, read; rank 0, worker 1, thread 2"
    expected = f"a data race at {text}: written, read; rank 0, worker 1, thread 2"
    assert with_names(report, PLACES) == expected
