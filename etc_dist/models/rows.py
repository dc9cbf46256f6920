"""The rows of a step: checked numbers of the caller, and their arrays."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from etc_dist.errors import expect_range
from etc_dist.functions.plan_shares import LEAST_RUN
from etc_dist.functions.sample_column import NUMBERS, SCALE
from etc_dist.models.mirror import HostArray, Mirror
from etc_dist.models.pages import UNUSED, PageTable, RowLimits, UsedPages
from etc_dist.models.row_numbers import integers, read_rows, unfit
from etc_dist.models.sampling import Sampling, row_sampling
from etc_dist.models.step_policy import MOST_OUTPUTS, MOST_REQUESTS
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
    """The rows of steps. numbers [4, rows]: ids, positions, requests and ends,
    int32. stops [rows, MOST_STOPS], or None for none. A
    row has a step at its position, then at each next one below its end, until a stop
    token. outputs: how many, the first ones, get ids and logits. sampling: that of
    `sample_column`, or None. longest: the number of positions of the longest request.
    used_pages: the table of pages. prompt_rows: of the last rows of a single step,
    those that `plan_shares` may put into blocks."""

    numbers: Array
    outputs: int
    longest: int
    stops: Array | None
    sampling: Array | None
    used_pages: UsedPages
    prompt_rows: int

    @property
    def samples(self) -> bool:
        """Whether any row is sampled, with a temperature above 0."""
        return self.sampling is not None and bool(self.sampling[:, SCALE].any())

    def signature(self) -> int:
        """A number of 63 bits, for `World.match_call`."""
        digest = hashlib.blake2b(self.used_pages.digest, digest_size=8)
        digest.update(self.outputs.to_bytes(8))
        for array in (self.numbers, self.stops, self.sampling):
            digest.update(b"" if array is None else array.tobytes())
            digest.update(b"|")
        return int.from_bytes(digest.digest(), "little") >> 1

    def describe(self) -> str:
        """The numbers as text, for errors."""
        array_by_name = dict(zip(NAMES, self.numbers, strict=True))
        array_by_name |= {"table": self.used_pages.table.ravel()}
        for name in ("stops", "sampling"):
            array = getattr(self, name)
            array_by_name |= {} if array is None else {name: array.ravel()}
        texts = [f"{name} {array.tolist()}" for name, array in array_by_name.items()]
        texts.append(f"outputs {self.outputs}")
        return f"model.steps({', '.join(texts)})"


class RowArrays:
    """The arrays of a model's steps, in the memory of its backend. Their addresses do
    not change, so that calls can be prepared once for each number of rows."""

    def __init__(self, table: tuple[int, ...], backend: str) -> None:
        self._backend = backend
        self._table = Mirror(table, backend, UNUSED)
        self._used_pages: UsedPages | None = None
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
        if rows.used_pages is not self._used_pages:
            self._table.host[...] = rows.used_pages.table
            self._table.send()
            self._used_pages = rows.used_pages
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
    values = np.full_like(mirror.host, value)
    if first is not None:
        values[: len(first)] = first
    if not (mirror.is_sent and np.array_equal(values, mirror.host)):
        mirror.is_sent = False
        mirror.host[...] = values
        mirror.send()


class RowChecks:
    """The checks of a model's steps. They take less time for rows of the same requests
    as in the last step of as many rows."""

    # NOTE: a step takes microseconds: all numbers are compared at once.

    def __init__(
        self, vocabulary: int, most_rows: int, most_positions: int, pages: PageTable
    ) -> None:
        self._vocabulary, self._most_rows = vocabulary, most_rows
        self._most_positions, self._pages = most_positions, pages
        self._limits: dict[int, tuple[bytes, RowLimits]] = {}
        """Of the last rows, by their number: the requests, and the limits."""

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
        outputs: int | None = None,
    ) -> StepRows:
        """The numbers of steps. ArgumentError if one is out of range, if two rows have
        one place in the cache, or if a position before a row was never written. ends:
        None for `steps` positions of the last row of each request, and one of the
        others. stops, sampling: None for none. outputs: None for all rows."""
        lists_by_name = {"ids": ids, "positions": positions, "requests": requests}
        if ends is not None:
            lists_by_name["ends"] = ends
        most_rows = (
            self._most_rows if steps == 1 else min(self._most_rows, MOST_REQUESTS)
        )
        numbers = read_rows(lists_by_name, most_rows)
        if ends is None:
            numbers = np.vstack([numbers, _default_ends(numbers, steps)])
        _, of_rows, requests, last = numbers
        num_rows = len(requests)
        if outputs is None and num_rows > MOST_OUTPUTS:
            raise unfit(
                f"at most {MOST_OUTPUTS} rows that get ids: outputs= of model.steps",
                f"{num_rows} rows without outputs=",
            )
        if outputs is None or steps > 1:
            outputs = num_rows
        most_outputs = min(num_rows, MOST_OUTPUTS)
        if type(outputs) is not int or not 1 <= outputs <= most_outputs:
            outputs = expect_range(outputs, 1, most_outputs, "outputs")
        limits = self._limits_of(requests, self._pages.examine(table))
        self._expect_below(numbers, limits, lists_by_name)
        if not (limits.are_apart or _are_own(limits, of_rows)):
            self._expect_apart(numbers, limits.used_pages.table)
        gap = self._pages.written.gap(limits, requests, of_rows)
        if gap is not None:
            row, missing = gap
            raise unfit(
                "rows whose earlier positions were written, by earlier steps or this",
                f"row {row} at position {of_rows[row]} of request {requests[row]}, "
                f"whose position {missing} was never written",
            )
        longest = _largest(of_rows) + 1
        if steps != 1 or ends is not None:
            longest = max(longest, _largest(last))
        of_stops = None if stops is None else self._read_stops(stops, num_rows)
        sampling_rows = None if sampling is None else row_sampling(num_rows, sampling)
        return StepRows(
            numbers,
            outputs,
            longest,
            of_stops,
            sampling_rows,
            limits.used_pages,
            limits.prompt_rows if steps == 1 else 0,
        )

    def add_written(self, rows: StepRows, ids: Array) -> None:
        """Later steps may attend to the positions of `rows`, the last checked ones,
        whose steps have run and found `ids` [steps, rows]."""
        counts = 1 if len(ids) == 1 else np.count_nonzero(ids >= 0, axis=0)
        self._pages.written.add(rows.numbers[POSITIONS] + counts)

    def _limits_of(self, requests: Array, used_pages: UsedPages) -> RowLimits:
        num_rows, key = len(requests), requests.tobytes()
        entry = self._limits.get(num_rows)
        if entry is not None and entry[0] == key and entry[1].used_pages is used_pages:
            return entry[1]
        # Requests that do not exist have any of these limits, beside their own.
        positions = used_pages.positions.take(requests, mode="clip")
        most = np.minimum(positions, self._most_positions)
        limits = np.empty((4, num_rows), np.uint32)
        limits[IDS], limits[REQUESTS] = self._vocabulary, len(used_pages.table)
        limits[POSITIONS], limits[ENDS] = most, most + 1
        own_from, is_apart = None, False
        if len(np.unique(requests)) == num_rows:
            is_apart = not used_pages.has_shared
            if used_pages.has_shared:
                own_from = used_pages.own_from.take(requests, mode="clip")
        prompt_rows = _prompt_rows(requests)
        row_limits = RowLimits(used_pages, limits, is_apart, own_from, prompt_rows)
        self._limits[num_rows] = key, row_limits
        return row_limits

    def _expect_below(
        self, numbers: Array, limits: RowLimits, lists_by_name: Mapping[str, Any]
    ) -> None:
        """All numbers are from 0, below their limits."""
        # As unsigned numbers, those below 0 are large.
        is_outside = numbers.view(np.uint32) >= limits.limits
        if 1 not in is_outside.tobytes():  # takes less than `any`
            return
        np.maximum(numbers[ENDS], 0, out=numbers[ENDS])  # ends have no lower limit
        is_outside = numbers.view(np.uint32) >= limits.limits
        if not is_outside.any():
            return
        values = {**dict(zip(NAMES, numbers, strict=True)), **lists_by_name}
        wanted, got = [], []
        for kind, row in zip(*_first_of_each(is_outside), strict=True):
            name, limit = NAMES[kind], limits.limits[kind, row]
            pages = ", on pages of the table" if kind in (POSITIONS, ENDS) else ""
            wanted.append(f"{name} from 0, below {limit}{pages}")
            got.append(f"{name}[{row}] = {values[name][row]}")
        raise unfit("; ".join(wanted), "; ".join(got))

    def _expect_apart(self, numbers: Array, table: Array) -> None:
        row = _shared_place(table, self._pages.page_size, numbers)
        if row is not None:
            wanted = "another position of the cache for each row"
            raise unfit(wanted, f"row {row} and one before it with one place")

    def _read_stops(self, stops: Sequence[Collection[int]], count: int) -> Array:
        """The stop tokens of each row, int32 [count, MOST_STOPS]."""
        if len(stops) != count:
            raise unfit(f"stops of {count} rows", f"stops of {len(stops)}")
        most = max(map(len, stops))
        if most > MOST_STOPS:
            raise unfit(f"at most {MOST_STOPS} stops of each row", str(most))
        tokens = integers("stops", list(chain(*stops)), 1)
        wrong = tokens[(tokens < 0) | (tokens >= self._vocabulary)]
        if len(wrong):
            raise unfit(f"stops below {self._vocabulary}", f"stops: {wrong[0]}")
        of_rows = np.full((count, MOST_STOPS), NO_ROW, np.int32)
        for row, of_row in enumerate(stops):
            of_rows[row, : len(of_row)] = sorted(of_row)
        return of_rows


def _prompt_rows(requests: Array) -> int:
    """Of the last rows, those in runs of LEAST_RUN or more rows of one request."""
    begins = np.flatnonzero(np.diff(requests, prepend=-1))
    lengths = np.diff(begins, append=len(requests))
    short = np.flatnonzero(lengths < LEAST_RUN)
    return int(lengths[short[-1] + 1 :].sum()) if len(short) else len(requests)


def _first_of_each(outside: Array) -> tuple[Array, Array]:
    """The kinds of numbers that are outside, and the first such row of each."""
    kinds = np.flatnonzero(outside.any(axis=1))
    return kinds, outside[kinds].argmax(axis=1)


def _are_own(limits: RowLimits, positions: Array) -> bool:
    """Whether each row has pages that no other place has, from its position on."""
    if limits.own_from is None:
        return False
    return 1 not in np.less(positions, limits.own_from).tobytes()


def _largest(numbers: Array) -> Any:
    return numbers.item(numbers.argmax())  # takes less than `max`


def _shared_place(table: Array, page_size: int, numbers: Array) -> int | None:
    """The first row that writes a position of the cache that a row before it writes.
    numbers: ids, positions, requests and ends."""
    _, positions, requests, ends = numbers
    rows, positions_written = ranges(positions, np.maximum(ends - positions, 1))
    pages = table[requests[rows], positions_written // page_size]
    places = pages * np.int64(page_size) + positions_written % page_size
    _, first_idx = np.unique(places, return_index=True)
    again = np.delete(np.arange(len(places)), first_idx)
    return int(rows[again[0]]) if len(again) else None


def _default_ends(numbers: Array, num_steps: int) -> Array:
    """One position of each row, and `num_steps` of the last row of each request."""
    _, positions, requests = numbers
    if num_steps == 1:
        return np.zeros_like(positions)
    _, request_idx = np.unique(requests, return_inverse=True)
    last = np.full_like(positions, -1)
    np.maximum.at(last, request_idx, positions)
    ends: Array = positions + np.where(positions == last[request_idx], num_steps, 1)
    return ends.astype(np.int32)
