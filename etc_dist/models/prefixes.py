"""Names of pages by the ids in them, so that later requests can begin with them."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from hashlib import blake2b

import numpy as np

KEY_BYTES = 32
"""Of a key: enough that nobody can construct two texts with the same one."""


class PageKeys:
    """The keys of a text's pages. A key depends on all ids up to the end of its page,
    as the keys and values in the page do."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._keys: list[bytes] = []

    def of(self, tokens: Sequence[int], count: int) -> list[bytes]:
        """Those of the first `count` pages, which are full. tokens: the text, of which
        only the end may have changed since the last call."""
        for idx in range(len(self._keys), count):
            first = idx * self._page_size
            ids = np.array(tokens[first : first + self._page_size], np.int32)
            before = self._keys[-1] if self._keys else b""
            digest = blake2b(before + ids.tobytes(), digest_size=KEY_BYTES)
            self._keys.append(digest.digest())
        return self._keys[:count]


class NamedPages:
    """Pages of a cache by their keys. Those that no request has are idle: they can be
    taken for other contents, first the one that has been idle for the longest time."""

    def __init__(self) -> None:
        self.pages: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}
        self._idle: dict[int, None] = {}
        """In the order in which they became idle."""

    @property
    def num_idle(self) -> int:
        """The number of pages that only their name keeps."""
        return len(self._idle)

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """The pages of the first keys, up to one that has none."""
        pages = []
        for key in keys:
            page = self.pages.get(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def add(self, key: bytes, page: int) -> None:
        """Name a page that a request has, unless its contents have a page."""
        if key not in self.pages and page not in self._keys:
            self._keys[page] = key
            self.pages[key] = page

    def use(self, pages: Iterable[int]) -> None:
        """Requests have these pages, of which some were idle."""
        for page in pages:
            self._idle.pop(page, None)

    def release(self, pages: Iterable[int]) -> list[int]:
        """No request has these pages any more. Returns those without a name."""
        unnamed = []
        for page in pages:
            if page in self._keys:
                self._idle[page] = None
            else:
                unnamed.append(page)
        return unnamed

    def take(self, count: int) -> list[int]:
        """The pages that have been idle for the longest time, without their names."""
        idle_pages = [page for page, _ in zip(self._idle, range(count), strict=False)]
        for page in idle_pages:
            del self.pages[self._keys.pop(page)]
            del self._idle[page]
        return idle_pages

    def settle(self, pages_in_use: Container[int]) -> list[int]:
        """After an interrupt, or where the contents are not known any more, in which
        case `pages` is empty: find what is idle. Requests have `pages_in_use`.
        Returns the idle ones."""
        self._keys = {page: key for key, page in self.pages.items()}
        pages = [*self._idle, *(page for page in self._keys if page not in self._idle)]
        idle = [p for p in pages if p in self._keys and p not in pages_in_use]
        self._idle = dict.fromkeys(idle)
        return list(self._idle)
