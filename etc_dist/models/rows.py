"""The rows of a step: checked numbers of the caller, and their arrays."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from itertools import chain
from math import prod
from typing import Any, NamedTuple

import numpy as np

from etc_dist.errors import ArgumentError
from etc_dist.functions.sample_column import NUMBERS, SCALE
from etc_dist.models.mirror import Mirror
from etc_dist.models.pages import UNUSED, PageTable, UsedPages
from etc_dist.models.sampling import Sampling, row_sampling

Array = np.ndarray[Any, Any]


MOST_STOPS = 8
"""Stop tokens of a row that steps in one launch look for."""
NO_ROW = -1
"""A stop token of none."""
UNUSED_ROW = NO_ROW, 0, NO_ROW, 0
"""Id, request, position and end of a row of no request."""


class StepRows(NamedTuple):
    """numbers [4, rows]: ids, requests, positions and ends. stops [rows,
    MOST_STOPS], or None for none. A row ends before position `end`, and after one of
    its stop tokens. sampling: that of `sample_column`, or None. longest: the last end.
    used: the table of pages."""

    numbers: Array
    longest: int
    stops: Array | None
    sampling: Array | None
    used: UsedPages

    @property
    def samples(self) -> bool:
        """Whether a token is chosen by chance."""
        return self.sampling is not None and bool(self.sampling[:, SCALE].any())

    def signature(self) -> int:
        """A number of 63 bits, for `World.match_call`."""
        digest = hashlib.blake2b(self.used.digest, digest_size=8)
        for array in (self.numbers, self.stops, self.sampling):
            digest.update(b"" if array is None else array.tobytes())
            digest.update(b"|")
        return int.from_bytes(digest.digest(), "little") >> 1

    def describe(self) -> str:
        names = "ids", "requests", "positions", "ends"
        named = dict(zip(names, self.numbers, strict=True))
        named |= {"table": self.used.table.ravel()}
        for name in ("stops", "sampling"):
            array = getattr(self, name)
            named |= {} if array is None else {name: array.ravel()}
        texts = [f"{name} {array.tolist()}" for name, array in named.items()]
        return f"model.steps({', '.join(texts)})"


class RowArrays:
    """The arrays of a model's steps, in the memory of its backend: they stay at their
    place, so that calls can be prepared once for each number of rows and steps."""

    def __init__(self, table: tuple[int, ...], backend: str) -> None:
        self._backend = backend
        self._table = Mirror(table, backend, UNUSED)
        self._used: UsedPages | None = None
        self._sections: dict[tuple[int, int], RowSections] = {}

    def fill(self, rows: StepRows, count: int, steps: int) -> dict[str, Any]:
        """The arrays of `rows` by the names of `decoder_graph`, padded to `count` rows
        with some that belong to no request."""
        sections = self._sections.get((count, steps))
        if sections is None:
            sections = RowSections(count, steps, self._backend)
            sections.arrays["table"] = self._table.device
            self._sections[count, steps] = sections
        sections.write(rows)
        if rows.used is not self._used:
            self._table.host[...] = rows.used.table
            self._table.send()
            self._used = rows.used
        return sections.arrays


class RowSections:
    """The arrays of steps with `count` rows, in one memory. ids and position have a row
    more for each step, which the program writes."""

    def __init__(self, count: int, steps: int, backend: str) -> None:
        shapes = {
            "ids": (steps + 1, count),
            "position": (steps + 1, count),
            "stop": (count, MOST_STOPS),
            "sampling": (count, NUMBERS),
            "request": (count,),
            "end": (count,),
        }
        # NOTE: sections begin at multiples of 16 bytes.
        sizes = {name: -(-prod(shape) // 4) * 4 for name, shape in shapes.items()}
        self._memory = Mirror((sum(sizes.values()),), backend, NO_ROW)
        self.arrays: dict[str, Any] = {}
        host, first = {}, 0
        for name, shape in shapes.items():
            section = slice(first, first + prod(shape))
            self.arrays[name] = self._memory.device[section].reshape(shape)
            host[name] = self._memory.host[section].reshape(shape)
            first += sizes[name]
        self._ids, self._requests = host["ids"][0], host["request"]
        self._positions, self._ends = host["position"][0], host["end"]
        self._stops, self._sampling = host["stop"], host["sampling"]
        self._sampling[...] = 0
        self._has_stops = self._has_sampling = False
        self._used = count  # all are to be set

    def write(self, rows: StepRows) -> None:
        """Set the first rows, the others to none, and send all."""
        # NOTE: a step takes microseconds: few operations, and no loop.
        numbers = rows.numbers
        count = numbers.shape[1]
        self._ids[:count], self._requests[:count] = numbers[0], numbers[1]
        self._positions[:count], self._ends[:count] = numbers[2], numbers[3]
        if count < self._used:
            sections = self._ids, self._requests, self._positions, self._ends
            for section, value in zip(sections, UNUSED_ROW, strict=True):
                section[count:] = value
        self._used = count
        if rows.stops is not None or self._has_stops:
            self._stops[...] = NO_ROW
            self._stops[:count] = NO_ROW if rows.stops is None else rows.stops
            self._has_stops = rows.stops is not None
        if rows.sampling is not None or self._has_sampling:
            self._sampling[...] = 0
            self._sampling[:count] = 0 if rows.sampling is None else rows.sampling
            self._has_sampling = rows.sampling is not None
        self._memory.send()


def check_rows(
    ids: Any,
    requests: Any,
    positions: Any,
    table: Any,
    *,
    steps: int,
    ends: Any,
    stops: Sequence[Collection[int]] | None,
    sampling: Sequence[Sampling | None] | None,
    vocabulary: int,
    most_rows: int,
    most_positions: int,
    pages: PageTable,
) -> StepRows:
    """The numbers of steps as int32 arrays; ArgumentError names all that are out of
    range. ends: None for `steps` positions of the last row of each request, and one of
    the others. stops, sampling: None for none."""
    # NOTE: a step takes microseconds: so all numbers are checked at once, and only an
    # error says which are wrong.
    of_rows = {"ids": ids, "requests": requests, "positions": positions}
    if ends is not None:
        of_rows["ends"] = ends
    numbers = _numbers(list(of_rows.values()), most_rows)
    pages_of = np.asarray(table)
    if numbers is not None and _is_table(pages_of, pages):
        used = pages.examine(pages_of)
        limits = _limits(vocabulary, len(pages.table), most_positions)
        open_ends = ends is None
        size = pages.page_size
        found = _found(numbers, open_ends, used, size, limits, steps, stops, sampling)
        if found is not None:
            return found
    raise _refusal(
        *(of_rows, table, steps, stops),
        vocabulary=vocabulary,
        most_rows=most_rows,
        most_positions=most_positions,
        pages=pages,
    )


def _numbers(given: Sequence[Any], most_rows: int) -> Array | None:
    """Integers of the rows as int64 [4, rows], of which the last may be left open. None
    for other numbers, another number of rows, or numbers of different shapes."""
    if _are_lists(given, most_rows):
        # NOTE: `struct` reads a list in a third of NumPy's time.
        numbers = np.empty((4, len(given[0])), np.int64)
        try:
            _packer(len(given) * numbers.shape[1])(numbers, 0, *chain(*given))
        except struct.error:  # not an integer of 64 bits
            pass
        else:
            return numbers
    arrays = [np.asarray(values) for values in given]
    if not _are_rows(arrays, most_rows):
        return None
    numbers = np.empty((4, len(arrays[0])), np.int64)
    for row, values in enumerate(arrays):
        numbers[row] = values
    return numbers


def _are_lists(given: Sequence[Any], most_rows: int) -> bool:
    """Whether these are lists of equal lengths, and do not begin with a bool."""
    first = given[0]
    if type(first) is not list or not 0 < len(first) <= most_rows:
        return False
    for values in given:
        if type(values) is not list or len(values) != len(first):
            return False
        if type(values[0]) is bool:
            return False
    return True


@cache
def _packer(count: int) -> Callable[..., None]:
    """Writes integers of 64 bits."""
    return struct.Struct(f"{count}q").pack_into


def _are_rows(arrays: Sequence[Array], most_rows: int) -> bool:
    shape = arrays[0].shape
    for values in arrays:
        if values.dtype.kind not in "iu" or values.shape != shape:
            return False
    return len(shape) == 1 and 0 < shape[0] <= most_rows


def _is_table(table: Array, pages: PageTable) -> bool:
    height, width = pages.table.shape
    is_whole = table.ndim == 2 and table.dtype.kind in "iu"
    return is_whole and 0 < table.shape[0] <= height and 0 < table.shape[1] <= width


@cache
def _limits(vocabulary: int, requests: int, positions: int) -> Array:
    """The numbers that ids, requests, positions and ends are below."""
    limits = vocabulary, requests, positions, positions + 1
    return np.array(limits, np.uint64)[:, None]


def _found(
    numbers: Array,
    open_ends: bool,
    used: UsedPages,
    page_size: int,
    limits: Array,
    steps: int,
    stops: Sequence[Collection[int]] | None,
    sampling: Sequence[Sampling | None] | None,
) -> StepRows | None:
    """None if a number is out of range, or two rows have one place in the cache.
    open_ends: the last row of `numbers` is to be set."""
    count = numbers.shape[1]
    requests, positions, last = numbers[1], numbers[2], numbers[3]
    if not open_ends:
        np.maximum(last, positions + 1, out=last)
    elif steps == 1:
        np.add(positions, 1, out=last)
    else:
        # The latest row of a request is found only among those that there are.
        are_known = requests.view(np.uint64) < limits[1, 0]
        if not are_known.all():
            return None
        last[...] = _default_ends(requests, positions, steps)
    # As unsigned numbers, those below 0 are large.
    if np.count_nonzero(numbers.view(np.uint64) >= limits):
        return None
    if np.count_nonzero(last > used.positions.take(requests)):
        return None
    is_plain = count == 1 or np.count_nonzero(np.bincount(requests)) == count
    is_plain = is_plain and not used.has_shared
    if not is_plain and _shared_place(used.table, page_size, numbers) is not None:
        return None
    of_stops: Array | None = None
    if stops is not None:
        if len(stops) != count or max(map(len, stops)) > MOST_STOPS:
            return None
        of_stops = np.full((count, MOST_STOPS), NO_ROW, np.int32)
        for place, tokens in enumerate(stops):
            of_stops[place, : len(tokens)] = sorted(tokens)
    chosen = None if sampling is None else row_sampling(count, sampling)
    longest = int(last[last.argmax()])  # takes less than `max`
    return StepRows(numbers, longest, of_stops, chosen, used)


def _shared_place(table: Array, page_size: int, numbers: Array) -> int | None:
    """The first row that writes a position of the cache that a row before it writes.
    numbers: ids, requests, positions and ends."""
    _, requests, positions, ends = numbers
    counts = ends - positions
    rows = np.repeat(np.arange(len(counts)), counts)
    first = np.cumsum(counts) - counts
    written = positions[rows] + np.arange(len(rows)) - first[rows]
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
        names = "ids", "requests", "positions", "ends"
        numbers = np.stack([given[name] for name in names])
        row = _shared_place(pages_of, pages.page_size, numbers)
        got = f"row {row} and one before it with one page and place"
        faults.append(("another position of the cache for each row", got))
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
    return array.astype(np.int64)
