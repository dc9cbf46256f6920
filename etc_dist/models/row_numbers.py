"""The integers of a step's rows, read from lists or arrays."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from itertools import chain
from typing import Any

import numpy as np

from etc_dist.errors import ArgumentError

Array = np.ndarray[Any, Any]
INT32 = np.iinfo(np.int32)


def read_rows(lists_by_name: Mapping[str, Any], most_rows: int) -> Array:
    """The numbers of rows, int32 [names, rows], from lists or arrays by name: ids,
    positions, requests, and ends unless they are left out.
    Those of more than 32 bits become the largest or smallest number. TypeError for
    others than integers, ArgumentError for another number of rows."""
    lists = [*lists_by_name.values()]
    num_rows = len(lists[0]) if {*map(type, lists)} == {list} else 0
    # NOTE: `struct` reads lists in a third of NumPy's time. It takes bools, too.
    if 0 < num_rows <= most_rows and {*map(len, lists)} == {num_rows}:
        ids, positions, requests, *more_lists = lists
        numbers = [*ids, *positions, *requests, *chain(*more_lists)]
        if bool not in map(type, numbers[::num_rows]):
            try:
                packed = bytearray(struct.pack(f"{len(numbers)}i", *numbers))
                return np.ndarray((len(lists), num_rows), np.int32, packed)
            except struct.error:
                pass  # not all are integers of 32 bits
    arrays = [integers(name, values, 1) for name, values in lists_by_name.items()]
    lengths = {name: len(a) for name, a in zip(lists_by_name, arrays, strict=True)}
    num_rows = len(arrays[0])
    if len({*lengths.values()}) > 1 or not 0 < num_rows <= most_rows:
        wanted = f"{', '.join(lists_by_name)} of 1 to {most_rows} rows, equally many"
        raise unfit(wanted, str(lengths))
    return np.clip(arrays, INT32.min, INT32.max).astype(np.int32)


def integers(name: str, value: Any, axes: int) -> Array:
    """`value` as an array of integers of 64 bits; those above become the largest.
    Raises TypeError for other elements or another number of axes."""
    array = np.asarray(value)
    if array.size == 0:  # NumPy makes floats of an empty list
        array = array.astype(np.int64)
    if array.ndim != axes or array.dtype.kind not in "iu":
        raise TypeError(
            f"{name} expects integers with {axes} axes, on the host, got "
            f"{type(value).__name__} with {array.ndim} of {array.dtype}"
        )
    if array.dtype == np.uint64:
        array = np.minimum(array, np.iinfo(np.int64).max)
    return array.astype(np.int64)


def unfit(wanted: str, got: str) -> ArgumentError:
    """The error for rows of a step that do not fit a model."""
    return ArgumentError(
        "the rows of a step do not fit the model",
        where="model.step",
        wanted=wanted,
        got=got,
        fix="correct these numbers; nothing was launched",
    )
