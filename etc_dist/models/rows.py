"""The rows of a step: checked numbers of the caller, and their arrays."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from etc_dist.errors import ArgumentError
from etc_dist.models.pages import UNUSED, PageTable

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class StepRows:
    """int32 arrays: ids, requests and positions [rows], table [requests, most_pages]
    of the model."""

    ids: Array
    requests: Array
    positions: Array
    table: Array

    def signature(self) -> int:
        """A number of 63 bits, for `World.match_call`."""
        digest = hashlib.blake2b(digest_size=8)
        for array in (self.ids, self.requests, self.positions, self.table):
            digest.update(array.tobytes())
            digest.update(b"|")
        return int.from_bytes(digest.digest(), "little") >> 1

    def describe(self) -> str:
        named = {"ids": self.ids, "requests": self.requests}
        named |= {"positions": self.positions, "table": self.table.ravel()}
        texts = [f"{name} {array.tolist()}" for name, array in named.items()]
        return f"model.step({', '.join(texts)})"


class RowArrays:
    """The arrays of a model's steps, in the memory of its backend: they stay at their
    place, so that calls can be prepared once for each number of rows."""

    def __init__(
        self, most_rows: int, table: tuple[int, ...], put: Callable[[Array], Any]
    ) -> None:
        self._table_on_host = np.full(table, UNUSED, np.int32)
        self._table = put(self._table_on_host.copy())
        self._rows = put(np.zeros(3 * most_rows, np.int32))

    def fill(self, rows: StepRows, count: int) -> dict[str, Any]:
        """The arrays of `rows` by the names of `decoder_graph`, padded to `count` rows
        with some that belong to no request."""
        # NOTE: sections begin at multiples of 16 bytes.
        stride = -(-count // 4) * 4
        sections = np.zeros((3, stride), np.int32)
        sections[2] = -1
        for section, values in zip(
            sections, (rows.ids, rows.requests, rows.positions), strict=True
        ):
            section[: len(values)] = values
        _write(self._rows[: 3 * stride], sections.reshape(-1))
        if not np.array_equal(rows.table, self._table_on_host):
            self._table_on_host[...] = rows.table
            _write(self._table, self._table_on_host)
        places = {
            name: self._rows[place * stride : place * stride + count]
            for place, name in enumerate(("ids", "request", "position"))
        }
        return {**places, "table": self._table}


def _write(array: Any, values: Array) -> None:
    if isinstance(array, np.ndarray):
        array[...] = values
    else:
        array.set(values)


def check_rows(
    ids: Any,
    requests: Any,
    positions: Any,
    table: Any,
    *,
    vocabulary: int,
    most_rows: int,
    most_positions: int,
    pages: PageTable,
) -> StepRows:
    """The numbers of a step as int32 arrays; ArgumentError names all that are out of
    range."""
    of_rows = {"ids": ids, "requests": requests, "positions": positions}
    given = {name: _integers(name, value, 1) for name, value in of_rows.items()}
    pages_of = _integers("table", table, 2)
    faults: list[tuple[str, str]] = []

    def expect(name: str, values: Array, limit: int) -> None:
        wrong = values[(values < 0) | (values >= limit)]
        if len(wrong):
            faults.append((f"{name} of 0 .. {limit - 1}", f"{name}: {wrong[0]}"))

    lengths = {name: len(values) for name, values in given.items()}
    if len(set(lengths.values())) > 1 or not 0 < lengths["ids"] <= most_rows:
        wanted = f"ids, requests and positions of 1 to {most_rows} rows, equally many"
        faults.append((wanted, f"{lengths}"))
    height, width = pages.table.shape
    if not (0 < pages_of.shape[0] <= height and 0 < pages_of.shape[1] <= width):
        wanted = f"table of up to {height} requests and {width} pages of each"
        faults.append((wanted, f"table {list(pages_of.shape)}"))
    if not faults:
        expect("ids", given["ids"], vocabulary)
        expect("requests", given["requests"], len(pages_of))
        longest = min(most_positions, pages_of.shape[1] * pages.page_size)
        expect("positions", given["positions"], longest)
    if not faults:
        last = given["positions"] // pages.page_size
        used = np.arange(pages_of.shape[1]) <= last[:, None]
        expect("pages", pages_of[given["requests"]][used], pages.table.size)
    if faults:
        raise ArgumentError(
            "the rows of a step do not fit the model",
            where="model.step",
            wanted="; ".join(wanted for wanted, _ in faults),
            got="; ".join(got for _, got in faults),
            fix="correct these numbers; nothing was launched",
        )
    whole = np.full(pages.table.shape, UNUSED, np.int32)
    whole[: pages_of.shape[0], : pages_of.shape[1]] = pages_of
    checked = {name: values.astype(np.int32) for name, values in given.items()}
    return StepRows(**checked, table=whole)


def _integers(name: str, value: Any, axes: int) -> Array:
    array = np.asarray(value)
    if array.size == 0:  # NumPy makes floats of an empty list
        array = array.astype(np.int64)
    if array.ndim != axes or array.dtype.kind not in "iu":
        raise TypeError(
            f"{name} expects integers with {axes} axes, on the host, got "
            f"{type(value).__name__} with {array.ndim} of {array.dtype}"
        )
    return array.astype(np.int64)
