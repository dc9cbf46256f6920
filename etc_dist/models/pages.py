"""The pages of a cache: which request has which of them."""

from __future__ import annotations

from typing import Any

import numpy as np

from etc_dist.errors import ArgumentError

UNUSED = -1
"""An entry of the table without a page; a run that reads it ends with an error."""


class PageTable:
    """The table of pages of up to `requests` requests, and which of `count` pages are
    free.

    table [requests, most_pages]: position p of request q is in page
    table[q, p // page_size]."""

    def __init__(
        self, requests: int, most_pages: int, page_size: int, count: int
    ) -> None:
        self.table = np.full((requests, most_pages), UNUSED, np.int32)
        self.page_size, self.count = page_size, count
        self._pages = list(reversed(range(count)))
        self._requests = list(reversed(range(requests)))

    @property
    def free_requests(self) -> int:
        return len(self._requests)

    @property
    def free_pages(self) -> int:
        return len(self._pages)

    def needed(self, length: int) -> int:
        """Pages of `length` positions."""
        return -(-length // self.page_size)

    def add(self, length: int) -> int:
        """The number of a new request, with pages for `length` positions.

        Raises ArgumentError if all requests or pages are in use."""
        if not self._requests:
            most = len(self.table)
            raise ArgumentError(
                "there are more requests than the model was loaded for",
                where=f"request {most} of a batch",
                wanted=f"at most {most} requests at once",
                got="another one",
                fix="wait for a request to end, or load the model with a larger batch=",
            )
        needed = self.needed(length)
        if needed > self.free_pages:
            raise ArgumentError(
                "the cache is full",
                where=f"a request of up to {length} tokens",
                wanted=f"{needed} free pages of {self.page_size} positions",
                got=f"{self.free_pages} free pages of {self.count}",
                fix="wait for a request to end, generate fewer tokens, or load the "
                "model with more pages=",
            )
        number = self._requests.pop()
        self.table[number, :needed] = [self._pages.pop() for _ in range(needed)]
        return number

    def remove(self, request: int) -> None:
        """Free a request and its pages."""
        row: Any = self.table[request]
        self._pages += row[row != UNUSED].tolist()
        row[...] = UNUSED
        self._requests.append(request)
