"""The pages of a cache: which request has which of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Any, NamedTuple
from weakref import ref

import numpy as np

from etc_dist.errors import ArgumentError, expect_range
from etc_dist.models.prefixes import NamedPages
from etc_dist.models.row_numbers import integers, unfit
from etc_dist.models.written import WrittenPositions

Array = np.ndarray[Any, Any]
UNUSED = -1
"""An entry of the table without a page; a run that reads it ends with an error."""


@dataclass(frozen=True)
class UsedPages:
    """A table in the size of the model's, int32, and for each request the positions
    that have pages of the cache, without a gap."""

    table: Array
    positions: Array
    page_size: int

    @cached_property
    def has_shared(self) -> bool:
        """Whether several places of the table have the same page."""
        pages = self.table[self.table != UNUSED]
        return len(np.unique(pages)) < len(pages)

    @cached_property
    def own_from(self) -> Array:
        """The position of each request from which on no other place has its pages."""
        pages, counts = np.unique(self.table, return_counts=True)
        shared = np.isin(self.table, pages[(counts > 1) & (pages != UNUSED)])
        width = shared.shape[1]
        last = np.where(shared.any(axis=1), width - shared[:, ::-1].argmax(axis=1), 0)
        first_positions: Array = last.astype(np.int32) * self.page_size
        return first_positions

    @cached_property
    def digest(self) -> bytes:
        """16 bytes that differ between tables."""
        return blake2b(self.table.tobytes(), digest_size=16).digest()


class RowLimits(NamedTuple):
    """Of rows of the same requests in each step. limits, uint32 [4, rows]: what ids,
    positions, requests and ends are below. are_apart: whether no two rows can have one
    place in the cache. own_from: the positions from which on they cannot, [rows]; None
    where two rows have one request. prompt_rows: see `StepRows`."""

    used_pages: UsedPages
    limits: Array
    are_apart: bool
    own_from: Array | None = None
    prompt_rows: int = 0


class PageTable:
    """The pages of a model's cache, `model.pages`: which request has which, and which
    of `count` are free. `Batch` adds and removes requests here.

    Requests can share full pages, which hold the same first ids of their texts. Such a
    page has a key, by which it is found also after its requests have ended, until other
    ones need the page: it is free, but its contents are kept.

    table [requests, most_pages], int32 on the host: position p of request q is in page
    table[q, p // page_size]; -1 where it has none. written: the positions that steps
    wrote, without those of free pages that have no key."""

    def __init__(
        self, requests: int, most_pages: int, page_size: int, count: int
    ) -> None:
        requests = expect_range(requests, 1, None, "requests")
        most_pages = expect_range(most_pages, 1, None, "most_pages")
        self.table = np.full((requests, most_pages), UNUSED, np.int32)
        self.page_size = expect_range(page_size, 1, None, "page_size")
        self.count = count = expect_range(count, 1, None, "count")
        self._owners: dict[int, ref[Any] | None] = {}
        """By request; the lists of free ones follow from it and from the table."""
        self._requests: list[int] = []
        self._pages: list[int] = []
        self._fresh = 0
        """The first page that no request has had; those below may be in `_pages`."""
        self._users: Counter[int] = Counter()
        """The number of requests that have a page."""
        self._named_pages = NamedPages()
        self._is_settled = False
        self._used_pages: tuple[Any, UsedPages | None] = None, None
        self.written = WrittenPositions(count, self.page_size)
        self._settle()

    @property
    def free_requests(self) -> int:
        """The number of requests that may be added."""
        return len(self.table) - len(self._owners)

    @property
    def free_pages(self) -> int:
        """The number of pages that no request has."""
        if not self._is_settled:
            self._settle()
        return self.count - self._fresh + len(self._pages) + self._named_pages.num_idle

    def needed(self, length: int, prefix: Sequence[int] = ()) -> int:
        """Free pages that a request of `length` positions takes. prefix: of `find`."""
        shared = sum(page in self._users for page in prefix)
        return -(-length // self.page_size) - shared

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """The pages of the first keys, up to one that no page has."""
        if not self._is_settled:
            self._settle()
        return self._named_pages.find(keys)

    def keep(self, request: int, first: int, keys: Sequence[bytes]) -> None:
        """Give the pages of a request from its `first` on, whose positions were all
        written, these keys. A page that has the key already keeps it."""
        if not self._is_settled:
            self._settle()
        self._is_settled = False
        pages = self.table[request, first : first + len(keys)].tolist()
        for key, page in zip(keys, pages, strict=True):
            self._named_pages.add(key, page)
        self._is_settled = True

    def add(self, length: int, owner: Any = None, prefix: Sequence[int] = ()) -> int:
        """The number of a new request, with pages for `length` positions. `owner`: an
        object that needs them; once it is dropped, the request is one of `ownerless`.
        prefix: the first of these pages, as `find` returns them.

        Raises ArgumentError if all requests or pages are in use."""
        length = expect_range(length, 0, None, "length")
        num_needed, free = self.needed(length, prefix), self.free_pages
        if not self.free_requests:
            num_requests = len(self.table)
            raise ArgumentError(
                "there are more requests than the model was loaded for",
                where=f"request {num_requests} of a batch",
                wanted=f"at most {num_requests} requests at once",
                got="another one",
                fix="wait for a request to end, or load the model with a larger batch=",
            )
        if num_needed > free:
            raise ArgumentError(
                "the cache is full",
                where=f"a request of up to {length} tokens",
                wanted=f"{num_needed} free pages of {self.page_size} positions",
                got=f"{free} free pages of {self.count}",
                fix="wait for a request to end, generate fewer tokens, or load the "
                "model with more pages=",
            )
        self._is_settled = False
        number = self._requests.pop()
        self._named_pages.use(prefix)
        whole = -(-length // self.page_size)
        pages = [*prefix, *self._take(whole - len(prefix))]
        self.table[number, :whole] = pages
        self._users.update(pages)
        self._owners[number] = None if owner is None else ref(owner)
        self._is_settled = True
        return number

    def _take(self, count: int) -> list[int]:
        """Pages that are free: such as have been used and have no key, then such as no
        request has had, then those that were kept."""
        new_pages = [self._pages.pop() for _ in range(min(count, len(self._pages)))]
        unused = min(self._fresh + count - len(new_pages), self.count)
        new_pages += range(self._fresh, unused)
        self._fresh = unused
        idle = self._named_pages.take(count - len(new_pages))
        if idle:
            self.written.forget(idle)
        return [*new_pages, *idle]

    def remove(self, request: int) -> None:
        """Free a request, and the pages that no other one has."""
        if not self._is_settled:
            self._settle()
        self._is_settled = False
        del self._owners[request]
        row: Any = self.table[request]
        pages = row[row != UNUSED].tolist()
        self._users.subtract(pages)
        unused_pages = [page for page in pages if not self._users[page]]
        for page in unused_pages:
            del self._users[page]
        # The last pages first: without them, those before can still be found.
        unnamed = self._named_pages.release(unused_pages[::-1])[::-1]
        self._pages += unnamed
        self.written.forget(unnamed)
        row[...] = UNUSED
        self._requests.append(request)
        self._is_settled = True

    def owned(self, owner: Any) -> list[int]:
        """Internal: the requests of `owner`, sorted."""
        return sorted(
            n
            for n, owner_ref in self._owners.items()
            if owner_ref and owner_ref() is owner
        )

    def ownerless(self) -> list[int]:
        """Internal: the requests whose owners were dropped, sorted."""
        return self.owned(None)

    def _settle(self) -> None:
        """Find what is free: at first, and after an interrupted change."""
        free = [n for n in range(len(self.table)) if n not in self._owners]
        self.table[free] = UNUSED
        pages = self.table[self.table != UNUSED]
        self._users = Counter(pages.tolist())
        idle = self._named_pages.settle(self._users)
        pages = np.concatenate([pages, np.array(idle, np.int32)])
        self._fresh = int(pages.max(initial=UNUSED)) + 1
        self._pages = np.setdiff1d(np.arange(self._fresh), pages)[::-1].tolist()
        self.written.forget(self._pages)
        self._requests = free[::-1]
        self._is_settled = True

    def examine(self, given: Any) -> UsedPages:
        """Internal: the pages in a table of integers [requests, pages]. The same object
        for the same numbers. ArgumentError for a table that is larger than this one."""
        table = np.asarray(given)
        if given is not self.table and self._named_pages.pages:  # it may write any page
            self._is_settled = False
            self._named_pages.pages.clear()
        key = table.shape, table.dtype, table.tobytes()
        if key == self._used_pages[0] and self._used_pages[1] is not None:
            return self._used_pages[1]
        used_pages = self._examine(integers("table", given, 2))
        self._used_pages = key, used_pages
        return used_pages

    def _examine(self, table: Array) -> UsedPages:
        (height, width), most = table.shape, self.table.shape
        if not (0 < height <= most[0] and 0 < width <= most[1]):
            wanted = f"table of up to {most[0]} requests and {most[1]} pages of each"
            raise unfit(wanted, f"table {[height, width]}")
        whole = np.full(most, UNUSED, np.int64)
        whole[:height, :width] = table
        is_page = (whole >= 0) & (whole < self.count)
        first = np.where(is_page.all(axis=1), whole.shape[1], is_page.argmin(axis=1))
        pages = np.where(is_page, whole, UNUSED).astype(np.int32)
        return UsedPages(pages, first * self.page_size, self.page_size)
