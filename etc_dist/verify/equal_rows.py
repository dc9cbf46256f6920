"""Equal rows of a table that is given by its columns, at least one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from etc_dist.verify.enumeration import Array

MOST_KEY = 2**62


def row_numbers(columns: Sequence[Array]) -> Array:
    """A number from 0 for each different row, without gaps."""
    return _dense(*_keys(columns))


def first_rows(columns: Sequence[Array]) -> Array:
    """The index of the first row of each kind, by its `row_numbers`."""
    keys, size = _keys(columns)
    if not _is_dense(keys, size):
        return np.unique(keys, return_index=True)[1]
    first = np.full(size, keys.size)
    first[keys[::-1]] = np.arange(keys.size)[::-1]
    row_idx: Array = first[first < keys.size]
    return row_idx


def _keys(columns: Sequence[Array]) -> tuple[Array, int]:
    """A key of each row, equal for equal rows alone, and the end of all keys."""
    keys, size = np.zeros(len(columns[0]), np.int64), 1
    for column in columns if keys.size else ():
        low = int(np.minimum.reduce(column))
        width = int(np.maximum.reduce(column)) - low + 1
        if width == 1:
            continue
        if size * width > MOST_KEY:
            keys, column, low = _dense(keys, size), _dense(column - low, width), 0
            size, width = (int(c.max()) + 1 for c in (keys, column))
        keys = keys * width + (column - low)
        size *= width
    return keys, size


def _dense(keys: Array, size: int) -> Array:
    numbers: Array
    if _is_dense(keys, size):
        present = np.zeros(size, bool)
        present[keys] = True
        numbers = (np.cumsum(present) - 1)[keys]
    else:
        numbers = np.unique(keys, return_inverse=True)[1]
    return numbers


def _is_dense(keys: Array, size: int) -> bool:
    """Whether a table by key takes less time than to sort the keys."""
    return size < 8 * keys.size
