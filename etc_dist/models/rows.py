"""The rows of a step: checked numbers of the caller, and their arrays."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from etc_dist.errors import ArgumentError
from etc_dist.functions.sample_column import NUMBERS, SCALE
from etc_dist.models.pages import UNUSED, PageTable
from etc_dist.models.sampling import Sampling, row_sampling

Array = np.ndarray[Any, Any]


MOST_STOPS = 8
"""Stop tokens of a row that steps in one launch look for."""


@dataclass(frozen=True)
class StepRows:
    """int32 arrays: ids, requests, positions and ends [rows], stops [rows, MOST_STOPS],
    table [requests, most_pages] of the model. A row ends before position `end`, and
    after one of its stop tokens. sampling: that of `sample_column`."""

    ids: Array
    requests: Array
    positions: Array
    ends: Array
    stops: Array
    table: Array
    sampling: Array

    @property
    def samples(self) -> bool:
        """Whether a token is chosen by chance."""
        return bool(self.sampling[:, SCALE].any())

    def signature(self) -> int:
        """A number of 63 bits, for `World.match_call`."""
        digest = hashlib.blake2b(digest_size=8)
        for name in self.__dataclass_fields__:
            array = getattr(self, name)
            digest.update(array.tobytes())
            digest.update(b"|")
        return int.from_bytes(digest.digest(), "little") >> 1

    def describe(self) -> str:
        fields = ((name, getattr(self, name)) for name in self.__dataclass_fields__)
        texts = [f"{name} {array.ravel().tolist()}" for name, array in fields]
        return f"model.steps({', '.join(texts)})"


class RowArrays:
    """The arrays of a model's steps, in the memory of its backend: they stay at their
    place, so that calls can be prepared once for each number of rows and steps."""

    def __init__(
        self,
        most_rows: int,
        most_steps: int,
        table: tuple[int, ...],
        put: Callable[[Array], Any],
    ) -> None:
        self._table_on_host = np.full(table, UNUSED, np.int32)
        self._table = put(self._table_on_host.copy())
        each = 2 * (most_steps + 1) + 2 + MOST_STOPS + NUMBERS
        padding = 4 * len(StepRows.__dataclass_fields__)
        self._rows = put(np.zeros(each * most_rows + padding, np.int32))

    def fill(self, rows: StepRows, count: int, steps: int) -> dict[str, Any]:
        """The arrays of `rows` by the names of `decoder_graph`, padded to `count` rows
        with some that belong to no request."""
        used = len(rows.ids)
        given = {
            "ids": np.full((steps + 1, count), -1, np.int32),
            "position": np.full((steps + 1, count), -1, np.int32),
            "request": np.zeros(count, np.int32),
            "end": np.zeros(count, np.int32),
            "stop": np.full((count, MOST_STOPS), -1, np.int32),
            "sampling": np.zeros((count, NUMBERS), np.int32),
        }
        given["ids"][0, :used], given["position"][0, :used] = rows.ids, rows.positions
        given["request"][:used], given["end"][:used] = rows.requests, rows.ends
        given["stop"][:used] = rows.stops
        given["sampling"][:used] = rows.sampling
        # NOTE: sections begin at multiples of 16 bytes.
        firsts = np.cumsum([0, *(-(-a.size // 4) * 4 for a in given.values())])
        whole = np.zeros(firsts[-1], np.int32)
        found = {}
        for first, (name, array) in zip(firsts, given.items(), strict=False):
            section = slice(int(first), int(first) + array.size)
            whole[section] = array.reshape(-1)
            found[name] = self._rows[section].reshape(array.shape)
        _write(self._rows[: len(whole)], whole)
        if not np.array_equal(rows.table, self._table_on_host):
            self._table_on_host[...] = rows.table
            _write(self._table, self._table_on_host)
        return {**found, "table": self._table}


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
    steps: int,
    ends: Any,
    stops: Any,
    sampling: Sequence[Sampling | None],
    vocabulary: int,
    most_rows: int,
    most_positions: int,
    pages: PageTable,
) -> StepRows:
    """The numbers of steps as int32 arrays; ArgumentError names all that are out of
    range. ends: None for `steps` positions of the last row of each request, and one of
    the others. stops: None for none."""
    of_rows = {"ids": ids, "requests": requests, "positions": positions}
    if ends is not None:
        of_rows["ends"] = ends
    given = {name: _integers(name, value, 1) for name, value in of_rows.items()}
    pages_of = _integers("table", table, 2)
    faults: list[tuple[str, str]] = []

    def expect(name: str, values: Array, limit: int) -> None:
        wrong = values[(values < 0) | (values >= limit)]
        if len(wrong):
            faults.append((f"{name} of 0 .. {limit - 1}", f"{name}: {wrong[0]}"))

    lengths = {name: len(values) for name, values in given.items()}
    if len(set(lengths.values())) > 1 or not 0 < lengths["ids"] <= most_rows:
        wanted = f"{', '.join(given)} of 1 to {most_rows} rows, equally many"
        faults.append((wanted, f"{lengths}"))
    if stops is not None:
        if len(stops) != lengths["ids"]:
            wanted = f"stops of {lengths['ids']} rows"
            faults.append((wanted, f"stops of {len(stops)}"))
        most = max(map(len, stops), default=0)
        if most > MOST_STOPS:
            faults.append((f"at most {MOST_STOPS} stops of each row", f"{most}"))
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
        last = given["positions"] + 1
        if ends is not None:
            last = np.maximum(last, given["ends"])
        elif steps > 1:
            last = _default_ends(given["requests"], given["positions"], steps)
        given["ends"] = last
        wrong = last[last > longest]
        if len(wrong):
            faults.append((f"ends of 0 .. {longest}", f"ends: {wrong[0]}"))
    if not faults:
        last = (given["ends"] - 1) // pages.page_size
        used = np.arange(pages_of.shape[1]) <= last[:, None]
        expect("pages", pages_of[given["requests"]][used], pages.count)
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
    of_stops = np.full((len(given["ids"]), MOST_STOPS), -1, np.int32)
    for row, tokens in zip(of_stops, stops or (), strict=False):
        row[: len(tokens)] = sorted(tokens)
    numbers = row_sampling(len(given["ids"]), sampling)
    return StepRows(**checked, stops=of_stops, table=whole, sampling=numbers)


def _default_ends(requests: Array, positions: Array, steps: int) -> Array:
    last = np.full(requests.max() + 1, -1)
    np.maximum.at(last, requests, positions)
    return positions + np.where(positions == last[requests], steps, 1)


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
