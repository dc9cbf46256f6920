"""The pages of a cache: which request has which of them."""

from __future__ import annotations

from typing import Any

import numpy as np

UNUSED = -1
"""An entry of the table without a page; a run that reads it ends with an error."""


class PageTable:
    """The table of pages of up to `requests` requests, and the pages that are free.

    table [requests, most_pages]: position p of request q is in page
    table[q, p // page_size]."""

    def __init__(self, requests: int, most_pages: int, page_size: int) -> None:
        self.table = np.full((requests, most_pages), UNUSED, np.int32)
        self.page_size = page_size
        self._pages = list(reversed(range(requests * most_pages)))
        self._requests = list(reversed(range(requests)))

    @property
    def free_requests(self) -> int:
        return len(self._requests)

    def add(self) -> int:
        """The number of a new request, without pages; there is a free one."""
        return self._requests.pop()

    def extend(self, request: int, length: int) -> None:
        """Make sure that a request has pages for `length` positions."""
        needed = -(-length // self.page_size)
        row = self.table[request]
        for index in np.flatnonzero(row[:needed] == UNUSED):
            row[index] = self._pages.pop()

    def remove(self, request: int) -> None:
        row: Any = self.table[request]
        self._pages += row[row != UNUSED].tolist()
        row[...] = UNUSED
        self._requests.append(request)
