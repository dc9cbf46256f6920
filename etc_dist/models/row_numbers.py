"""The numbers of a step's rows, read from lists."""

from __future__ import annotations

import struct
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from etc_dist.models.pages import UsedPages

Array = np.ndarray[Any, Any]


class Known(NamedTuple):
    """What is known of rows of the same requests in each step. limits, uint32 [4,
    rows]: what the numbers of each row are below. are_apart: whether no two rows can
    have one place in the cache."""

    used: UsedPages
    limits: Array
    are_apart: bool


class RowNumbers:
    """Integers of `count` rows, int32, and what their checks compute: arrays that all
    steps of as many rows share, since making them takes most of a check. known: of
    these requests, or None."""

    def __init__(self, count: int) -> None:
        self.all = np.zeros((4, count), np.int32)
        ids, self.positions, self.requests, self.ends = self.all
        self._unsigned = self.all.view(np.uint32)
        self._outside = np.empty((4, count), np.bool_)
        self.known: Known | None = None
        # NOTE: `struct` reads a list in a third of NumPy's time. Its x is a zero.
        integers, zeros = struct.Struct(f"{count}i"), struct.Struct(f"{4 * count}x")
        self._pack = integers.pack
        self._set_ids = partial(integers.pack_into, ids.data, 0)
        self._set_positions = partial(integers.pack_into, self.positions.data, 0)
        self._set_ends = partial(integers.pack_into, self.ends.data, 0)
        self._clear_ends = partial(zeros.pack_into, self.ends.data, 0)
        self._requests = b""

    def read(
        self,
        ids: list[Any],
        positions: list[Any],
        requests: list[Any],
        ends: list[Any] | None = None,
    ) -> bool:
        """Set them from lists of `count` numbers; ends are 0 if they are not given.
        False for lists of other lengths, for lists that begin with a bool, and if
        `struct` takes one of the numbers for no integer of 32 bits."""
        try:
            self._set_ids(*ids)
            self._set_positions(*positions)
            if ends is None:
                self._clear_ends()
            else:
                self._set_ends(*ends)
            packed = self._pack(*requests)
        except struct.error:
            return False
        if packed != self._requests:
            self._requests, self.known = b"", None  # also if an interrupt follows
            self.requests[...] = np.frombuffer(packed, np.int32)
            self._requests = packed
        first = type(ids[0]), type(positions[0]), type(requests[0])
        return bool not in first and (ends is None or type(ends[0]) is not bool)

    def are_below(self, limits: Array) -> bool:
        """Whether all are from 0, below their limit, uint32 [4, count]."""
        # As unsigned numbers, those below 0 are large.
        np.greater_equal(self._unsigned, limits, self._outside)
        return 1 not in self._outside.tobytes()  # takes less than `any`
