"""The rows of a step: checked numbers of the caller, and their arrays."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from etc_dist.errors import ArgumentError
from etc_dist.functions.sample_column import NUMBERS, SCALE
from etc_dist.models.mirror import HostArray, Mirror
from etc_dist.models.pages import UNUSED, PageTable, UsedPages
from etc_dist.models.row_numbers import Known, RowNumbers
from etc_dist.models.sampling import Sampling, row_sampling
from etc_dist.models.written import ranges

Array = np.ndarray[Any, Any]


MOST_STOPS = 8
"""Stop tokens of a row that steps in one launch look for."""
NO_ROW = -1
"""A stop token that no id equals: for none."""
IDS, POSITIONS, REQUESTS, ENDS = range(4)
NAMES = "ids", "positions", "requests", "ends"
"""The rows of `StepRows.numbers`, and their names in errors."""
UNUSED_ROW = np.array([[NO_ROW], [NO_ROW], [0], [0]])
"""The numbers of a row without a request."""


class StepRows(NamedTuple):
    """The rows of steps. numbers [4, rows]: ids, positions, requests and ends, until
    `RowChecks` checks as many rows again. stops [rows, MOST_STOPS], or None for none. A
    row has a step at its position, then at each next one below its end, until a stop
    token. sampling: that of `sample_column`, or None. longest: the number of positions
    of the longest request. used: the table of pages."""

    numbers: Array
    longest: int
    stops: Array | None
    sampling: Array | None
    used: UsedPages

    @property
    def samples(self) -> bool:
        """Whether any row is sampled, with a temperature above 0."""
        return self.sampling is not None and bool(self.sampling[:, SCALE].any())

    def signature(self) -> int:
        """A number of 63 bits, for `World.match_call`."""
        digest = hashlib.blake2b(self.used.digest, digest_size=8)
        for array in (self.numbers, self.stops, self.sampling):
            digest.update(b"" if array is None else array.tobytes())
            digest.update(b"|")
        return int.from_bytes(digest.digest(), "little") >> 1

    def describe(self) -> str:
        named = dict(zip(NAMES, self.numbers, strict=True))
        named |= {"table": self.used.table.ravel()}
        for name in ("stops", "sampling"):
            array = getattr(self, name)
            named |= {} if array is None else {name: array.ravel()}
        texts = [f"{name} {array.tolist()}" for name, array in named.items()]
        return f"model.steps({', '.join(texts)})"


class RowArrays:
    """The arrays of a model's steps, in the memory of its backend. Their addresses do
    not change, so that calls can be prepared once for each number of rows."""

    def __init__(self, table: tuple[int, ...], backend: str) -> None:
        self._backend = backend
        self._table = Mirror(table, backend, UNUSED)
        self._used: UsedPages | None = None
        self._sections: dict[int, RowSections] = {}

    def fill(self, rows: StepRows, count: int) -> dict[str, Any]:
        """The arrays of `rows` by the names of `decoder_graph`, padded to `count` rows
        with rows without a request."""
        sections = self._sections.get(count)
        if sections is None:
            sections = RowSections(count, self._backend)
            sections.arrays["table"] = self._table.device
            self._sections[count] = sections
        sections.write(rows)
        if rows.used is not self._used:
            self._table.host[...] = rows.used.table
            self._table.send()
            self._used = rows.used
        return sections.arrays


class RowSections:
    """The arrays of steps with `count` rows. The numbers of rows change in each step:
    the program reads them from the host's memory. Others are sent if they change."""

    def __init__(self, count: int, backend: str) -> None:
        # NOTE: arrays begin at multiples of 16 bytes.
        whole = HostArray((len(UNUSED_ROW), -(-count // 4) * 4), backend, 0)
        self._numbers = whole.host[:, :count]
        self._first = self._numbers[:, :0]
        """The rows that were written last."""
        ids, position, request, end = (row[:count] for row in whole.device)
        self._stops = Mirror((count, MOST_STOPS), backend, NO_ROW)
        self._sampling = Mirror((count, NUMBERS), backend, 0)
        self._is_plain = True
        """Whether no row has stop tokens, or is sampled."""
        self.arrays: dict[str, Any] = {
            "ids": ids,
            "position": position,
            "request": request,
            "end": end,
            "stop": self._stops.device,
            "sampling": self._sampling.device,
        }

    def write(self, rows: StepRows) -> None:
        """Set the first rows, and the others to none."""
        # NOTE: a step takes microseconds: few operations, and no loop.
        numbers = rows.numbers
        if self._first.shape != numbers.shape:
            self._numbers[...] = UNUSED_ROW
            self._first = self._numbers[:, : numbers.shape[1]]
        self._first[...] = numbers
        is_plain = rows.stops is None and rows.sampling is None
        if not (is_plain and self._is_plain):
            self._is_plain = False  # also if an interrupt follows
            _update(self._stops, rows.stops, NO_ROW)
            _update(self._sampling, rows.sampling, 0)
        self._is_plain = is_plain


def _update(mirror: Mirror, first: Array | None, value: int) -> None:
    """Sets the first rows, or none, and the others to `value`. Sends what differs."""
    wanted = np.full_like(mirror.host, value)
    if first is not None:
        wanted[: len(first)] = first
    if not (mirror.is_sent and np.array_equal(wanted, mirror.host)):
        mirror.is_sent = False
        mirror.host[...] = wanted
        mirror.send()


class RowChecks:
    """The checks of a model's steps. They take less time for rows of the same requests
    as in the last step of as many rows."""

    # NOTE: a step takes microseconds: so all numbers are checked at once, and only an
    # error says which are wrong.

    def __init__(
        self, vocabulary: int, most_rows: int, most_positions: int, pages: PageTable
    ) -> None:
        self._vocabulary, self._most_rows = vocabulary, most_rows
        self._most_positions, self._pages = most_positions, pages
        self._numbers = cache(RowNumbers)

    def check(
        self,
        ids: Any,
        requests: Any,
        positions: Any,
        table: Any,
        *,
        steps: int = 1,
        ends: Any = None,
        stops: Sequence[Collection[int]] | None = None,
        sampling: Sequence[Sampling | None] | None = None,
    ) -> StepRows:
        """The numbers of steps; ArgumentError names all that are out of range. ends:
        None for `steps` positions of the last row of each request, and one of the
        others. stops, sampling: None for none."""
        numbers = self._read(ids, positions, requests, ends)
        used = self._pages.examine(table)
        if numbers is not None and used is not None:
            default = steps if ends is None else 0
            found = self._found(numbers, used, default, stops, sampling)
            if found is not None:
                return found
        of_rows = {"ids": ids, "requests": requests, "positions": positions}
        if ends is not None:
            of_rows["ends"] = ends
        raise _refusal(
            *(of_rows, table, steps, stops),
            vocabulary=self._vocabulary,
            most_rows=self._most_rows,
            most_positions=self._most_positions,
            pages=self._pages,
        )

    def add_written(self, rows: StepRows, ids: Array) -> None:
        """Later steps may attend to the positions of `rows`, the last checked ones,
        whose steps have run and found `ids` [steps, rows]."""
        counts = 1 if len(ids) == 1 else np.count_nonzero(ids >= 0, axis=0)
        self._pages.written.add(rows.numbers[POSITIONS] + counts)

    def _read(
        self, ids: Any, positions: Any, requests: Any, ends: Any
    ) -> RowNumbers | None:
        """Integers of the rows. None for others than integers, another number of rows,
        different shapes, and numbers that are too large or small for any row."""
        are_lists = type(ids) is type(positions) is type(requests) is list
        if are_lists and (ends is None or type(ends) is list):
            count = len(ids)
            if 0 < count <= self._most_rows:
                numbers = self._numbers(count)
                if numbers.read(ids, positions, requests, ends):
                    return numbers
        given = [ids, positions, requests]
        if ends is not None:
            given.append(ends)
        arrays = [np.asarray(values) for values in given]
        if not _are_rows(arrays, self._most_rows):
            return None
        # Ends have no lower limit.
        arrays[ENDS:] = [np.maximum(values, 0) for values in arrays[ENDS:]]
        numbers = self._numbers(len(arrays[0]))
        return numbers if numbers.read(*[a.tolist() for a in arrays]) else None

    def _found(
        self,
        numbers: RowNumbers,
        used: UsedPages,
        steps: int,
        stops: Sequence[Collection[int]] | None,
        sampling: Sequence[Sampling | None] | None,
    ) -> StepRows | None:
        """None if a number is out of range, or two rows have one place in the cache.
        steps: of the last row of each request; 0 if ends are given."""
        known, requests = numbers.known, numbers.requests
        if known is None or known.used is not used:
            if np.any(requests.view(np.uint32) >= len(used.table)):
                return None
            known = numbers.known = self._examine(requests, used)
        positions, ends = numbers.positions, numbers.ends
        if steps == 0:
            np.maximum(ends, 0, out=ends)
        elif steps > 1:
            ends[...] = _default_ends(requests, positions, steps)
        if not numbers.are_below(known.limits):
            return None
        size, found = self._pages.page_size, numbers.all
        if not known.are_apart and _shared_place(used.table, size, found) is not None:
            return None
        if not self._pages.written.has(known, requests, positions):
            return None
        of_stops: Array | None = None
        if stops is not None:
            count = len(requests)
            if len(stops) != count or max(map(len, stops)) > MOST_STOPS:
                return None
            tokens = _integers("stops", list(chain(*stops)), 1)
            if np.any((tokens < 0) | (tokens >= self._vocabulary)):
                return None
            of_stops = np.full((count, MOST_STOPS), NO_ROW, np.int32)
            for place, of_row in enumerate(stops):
                of_stops[place, : len(of_row)] = sorted(of_row)
        chosen = None if sampling is None else row_sampling(len(requests), sampling)
        longest = _largest(positions) + 1
        if steps != 1:
            longest = max(longest, _largest(ends))
        return StepRows(found, longest, of_stops, chosen, used)

    def _examine(self, requests: Array, used: UsedPages) -> Known:
        """The limits of rows of `requests`, all of which exist."""
        most = np.minimum(used.positions.take(requests), self._most_positions)
        limits = np.empty((4, len(requests)), np.uint32)
        limits[IDS], limits[REQUESTS] = self._vocabulary, len(used.table)
        limits[POSITIONS], limits[ENDS] = most, most + 1
        are_apart = len(np.unique(requests)) == len(requests) and not used.has_shared
        return Known(used, limits, are_apart)


def _are_rows(arrays: Sequence[Array], most_rows: int) -> bool:
    shape = arrays[0].shape
    for values in arrays:
        if values.dtype.kind not in "iu" or values.shape != shape:
            return False
    return len(shape) == 1 and 0 < shape[0] <= most_rows


def _largest(numbers: Array) -> Any:
    return numbers.item(numbers.argmax())  # takes less than `max`


def _shared_place(table: Array, page_size: int, numbers: Array) -> int | None:
    """The first row that writes a position of the cache that a row before it writes.
    numbers: ids, positions, requests and ends."""
    _, positions, requests, ends = numbers
    rows, written = ranges(positions, np.maximum(ends - positions, 1))
    pages = table[requests[rows], written // page_size]
    places = pages * np.int64(page_size) + written % page_size
    _, kept = np.unique(places, return_index=True)
    again = np.delete(np.arange(len(places)), kept)
    return int(rows[again[0]]) if len(again) else None


def _refusal(
    of_rows: Mapping[str, Any],
    table: Any,
    steps: int,
    stops: Sequence[Collection[int]] | None,
    *,
    vocabulary: int,
    most_rows: int,
    most_positions: int,
    pages: PageTable,
) -> ArgumentError:
    """The error that names all numbers that are out of range."""
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
        expect("stops", _integers("stops", list(chain(*stops)), 1), vocabulary)
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
        if "ends" in given:
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
    if not faults:
        numbers = np.stack([given[name] for name in NAMES])
        row = _shared_place(pages_of, pages.page_size, numbers)
        if row is not None:
            got = f"row {row} and one before it with one page and place"
            faults.append(("another position of the cache for each row", got))
    if not faults:
        used_pages = pages.examine(pages_of)
        assert used_pages is not None  # the numbers above fit
        places = used_pages.table, numbers[REQUESTS], numbers[POSITIONS]
        row, request, position, missing = pages.written.missing(*places)
        got = f"row {row} at position {position} of request {request}, whose position "
        got += f"{missing} was never written"
        wanted = (
            "rows whose earlier positions were written, by earlier steps or by this"
        )
        faults.append((wanted, got))
    return ArgumentError(
        "the rows of a step do not fit the model",
        where="model.step",
        wanted="; ".join(wanted for wanted, _ in faults),
        got="; ".join(got for _, got in faults),
        fix="correct these numbers; nothing was launched",
    )


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
    if array.dtype == np.uint64 and np.any(array > np.iinfo(np.int64).max):
        return array.astype(object)  # which has numbers of any size
    return array.astype(np.int64)
