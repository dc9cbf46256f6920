"""Which positions of a cache were written."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from etc_dist.models.pages import RowLimits

Array = np.ndarray[Any, Any]


class WrittenPositions:
    """The positions of a cache that steps wrote since their page was free.

    A row attends to all positions up to its own. So the written positions of a page are
    its first ones, and those of a request, too: their number describes them. Those of
    the last rows are counted by row, and later added to their pages."""

    # NOTE: a step takes microseconds: rows of the same requests need few operations.

    def __init__(self, pages: int, page_size: int) -> None:
        self._page_size = page_size
        self._of_pages = np.zeros(pages + 1, np.int32)  # the last one: of no page
        self._limits: RowLimits | None = None
        self._pages = self._requests = self._lengths = self._page_lengths = np.zeros(
            0, int
        )
        """Of each of the last rows: the pages, the request, a lower bound of the number
        of written positions, and those of them that `_of_pages` has."""

    def gap(
        self, limits: RowLimits, requests: Array, positions: Array
    ) -> tuple[int, int] | None:
        """A row of a step, and a position before it that no step has written and that
        is none of the rows'; None if there is none. No two rows have one place."""
        if limits is not self._limits:
            self._store()
            self._count(limits, requests)
        most = self._lengths
        if not limits.are_apart:
            new = requests[positions >= most]
            most = most + np.bincount(new, minlength=requests.max() + 1)[requests] - 1
        if 1 not in np.greater(positions, most).tobytes():  # takes less than `all`
            return None
        return self._exact_gap(limits, requests, positions)

    def add(self, ends: Array) -> None:
        """The last rows wrote all positions below their end."""
        if self._limits is not None and not self._limits.are_apart:
            of_requests = np.zeros(self._requests.max() + 1, np.int32)
            np.maximum.at(of_requests, self._requests, ends)
            ends = of_requests[self._requests]
        np.maximum(self._lengths, ends, out=self._lengths)

    def forget(self, pages: Array | list[int]) -> None:
        """These pages are free."""
        self._store()
        self._limits = None
        self._of_pages[pages] = 0

    def _count(self, limits: RowLimits, requests: Array) -> None:
        self._limits = None  # also if an interrupt follows
        self._requests = requests.copy()
        self._pages = limits.used_pages.table[requests]
        self._page_lengths = self._lengths_of(self._pages, self._of_pages)
        self._lengths = self._page_lengths.copy()
        self._limits = limits

    def _lengths_of(self, pages: Array, of_pages: Array) -> Array:
        """The number of written positions of rows with these pages."""
        counts = of_pages[np.pad(pages, ((0, 0), (0, 1)), constant_values=-1)]
        first = (counts < self._page_size).argmax(axis=1)
        of_first = counts[np.arange(len(pages)), first]
        lengths: Array = (first * self._page_size + of_first).astype(np.int32)
        return lengths

    def _store(self) -> None:
        """Add the counts of the last rows to those of their pages."""
        if self._limits is None:
            return
        first, end = (
            self._page_lengths // self._page_size,
            -(-self._lengths // self._page_size),
        )
        rows, places = ranges(first, np.maximum(end - first, 0))
        counts = self._lengths[rows] - places * self._page_size
        pages = self._pages[rows, places]
        np.maximum.at(self._of_pages, pages, np.minimum(counts, self._page_size))

    def _exact_gap(
        self, limits: RowLimits, requests: Array, positions: Array
    ) -> tuple[int, int] | None:
        """The same from the counts of the pages, which other rows may write."""
        self._store()
        self._count(limits, requests)
        pages = limits.used_pages.table[requests, positions // self._page_size]
        slots, counts = positions % self._page_size, self._of_pages[pages]
        new = np.bincount(pages[slots >= counts], minlength=len(self._of_pages))
        rows = np.flatnonzero(slots >= counts + new[pages])
        if len(rows):  # a slot of its page is left out
            row, slot = int(rows[0]), slots[rows[0]]
            taken_slots = slots[pages == pages[row]]
            (first, *_) = np.setdiff1d(np.arange(counts[row], slot), taken_slots)
            return row, int(positions[row] - slot + first)
        lengths = self._lengths_of(self._pages, self._of_pages + new)
        rows = np.flatnonzero(positions >= lengths)
        return (int(rows[0]), int(lengths[rows[0]])) if len(rows) else None


def ranges(begins: Array, counts: Array) -> tuple[Array, Array]:
    """The i and the numbers of `counts[i]` numbers from `begins[i]` on for each i."""
    of = np.repeat(np.arange(len(counts)), counts)
    first = np.cumsum(counts) - counts
    return of, begins[of] + np.arange(len(of)) - first[of]
