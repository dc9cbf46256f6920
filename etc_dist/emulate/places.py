"""Addresses in the emulator's reports, as elements of tensors."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

NEAR = 1 << 16
"""Bytes around an array that are described as before or after it."""


@dataclass(frozen=True)
class Place:
    """An array of a rank in memory. `shape` is None for other memory than tensors."""

    name: str
    begin: int
    nbytes: int
    shape: tuple[int, ...] | None = None
    itemsize: int = 1

    @property
    def end(self) -> int:
        """The address after its last byte."""
        return self.begin + self.nbytes

    def element(self, address: int) -> str:
        """The element at an address within."""
        if self.shape is None:
            return self.name
        index: Any = np.unravel_index(
            (address - self.begin) // self.itemsize, self.shape
        )
        name, _, of = self.name.partition(" ")
        return f"{name}[{', '.join(str(int(i)) for i in index)}] {of}".strip()


def with_names(report: str, places: Sequence[Place]) -> str:
    """`report` with elements of `places` in place of its addresses, such as @7f00."""

    def described(match: re.Match[str]) -> str:
        return _describe(int(match[1], 16), places)

    return re.sub(r"@([0-9a-f]+)", described, report)


def _describe(address: int, places: Sequence[Place]) -> str:
    for place in places:
        if place.begin <= address < place.end:
            return place.element(address)
    distances = [(address - p.end, "after the end of", p) for p in places]
    distances += [(p.begin - address, "before", p) for p in places]
    near = [distance for distance in distances if 0 <= distance[0] < NEAR]
    if not near:
        return "far from all of them"
    count, side, place = min(near, key=lambda distance: distance[0])
    return f"{count} bytes {side} {place.name}"
