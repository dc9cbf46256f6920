"""The numbers of a step: padding, pages, and what the host does for each step."""

from __future__ import annotations

import ctypes
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from etc_dist.errors import ArgumentError
from etc_dist.models import load
from etc_dist.models.mirror import HostArray, Mirror
from etc_dist.models.pages import PageTable
from etc_dist.models.rows import RowArrays, RowChecks
from etc_dist.models.sampling import Sampling
from tests.models.small import make_model

TABLE = np.array([[0, 1], [2, 3]])


def make_checks():
    """Checks of rows on pages of which all positions were written."""
    pages = PageTable(2, 2, 16, 4)
    checks = RowChecks(520, 8, 30, pages)
    first = checks.check([1, 1], [0, 1], [0, 0], TABLE, ends=[30, 30])
    checks.add_written(first, np.zeros((30, 2)))
    return checks


def checked(ids, requests, positions, table=TABLE, **options):
    return make_checks().check(ids, requests, positions, table, **options)


def test_rows_that_are_not_used_belong_to_no_request():
    arrays = RowArrays((2, 2), "cpu")
    more = {"stops": [{4}, {5}, {6}], "sampling": 3 * [Sampling(seed=2)]}
    arrays.fill(checked([1, 2, 3], [0, 1, 0], [5, 6, 7], **more), 4)
    arguments = arrays.fill(checked([8, 9], [1, 0], [3, 2]), 4)
    assert arguments["ids"].tolist() == [8, 9, -1, -1]
    assert arguments["position"].tolist() == [3, 2, -1, -1]
    assert arguments["request"].tolist() == [1, 0, 0, 0]
    assert arguments["end"].tolist() == [0, 0, 0, 0]
    assert np.all(arguments["stop"] == -1) and np.all(arguments["sampling"] == 0)
    assert arguments["table"].tolist() == TABLE.tolist()


def test_a_table_that_changes_in_place_is_seen():
    arrays, table = RowArrays((2, 2), "cpu"), TABLE.copy()
    pages = PageTable(2, 2, 16, 4)
    assert pages.examine(table) is pages.examine(table.copy())
    table[0, 1] = 7
    assert pages.examine(table).positions.tolist() == [16, 32]
    assert arrays.fill(checked([1], [1], [0]), 1)["table"].tolist() == TABLE.tolist()


@pytest.mark.parametrize(
    ("rows", "options", "text"),
    [
        (([2**40], [0], [0]), {}, rf"ids\[0\] = {2**40}"),
        ((np.array([2**64 - 1], np.uint64), [0], [0]), {}, rf"ids\[0\] = {2**64 - 1}"),
        (
            ([1], [0], [0]),
            {"ends": np.array([2**63], np.uint64)},
            rf"ends\[0\] = {2**63}",
        ),
        (
            ([1], [0], [0]),
            {"table": np.array([[2**63]], np.uint64)},
            "positions from 0, below 0, on pages",
        ),
        (([1], [2**40], [0]), {"steps": 2}, rf"requests\[0\] = {2**40}"),
        (([1], [0], [30]), {}, r"positions\[0\] = 30"),
        (([1], [0], [29]), {"ends": [31]}, r"ends\[0\] = 31"),
        (([1], [0], [0]), {"ends": [17], "table": [[0, -1]]}, r"ends\[0\] = 17"),
        (([1], [1], [0]), {"table": [[0]]}, r"positions\[0\] = 0"),
        (([1], [0], [0]), {"stops": [{1}, {2}]}, "stops of 2"),
        (([1], [0], [0]), {"stops": [set(range(9))]}, "9"),
        (([1], [0], [0]), {"stops": [{2**31}]}, f"stops: {2**31}"),
        (([1], [0], [0]), {"stops": [{1, -5}]}, "stops: -5"),
        (([1, 2], [0, 0], [0, 1]), {"ends": [2, 2]}, "row 1 and one before it"),
    ],
)
def test_numbers_out_of_range_are_named(rows, options, text):
    with pytest.raises(ArgumentError, match=text):
        checked(*rows, **options)


@pytest.mark.parametrize("stops", [[{1.5}], [{True}], ["5"], [{"x"}]])
def test_stops_of_other_types_are_refused(stops):
    with pytest.raises(TypeError, match="stops expects integers"):
        checked([1], [0], [0], stops=stops)


def test_bools_of_numpy_beside_integers_are_integers():
    rows = checked([1, np.True_], [0, np.True_], [5, np.False_])
    assert rows.numbers[:3].tolist() == [[1, 1], [5, 0], [0, 1]]


def outcome(checks, *rows, **options):
    try:
        return checks.check(*rows, **options).numbers.tolist()
    except (ArgumentError, TypeError) as error:
        return str(error)


def test_what_is_known_of_requests_changes_no_check():
    """The same steps, one after another and each alone."""
    checks, short, shared = make_checks(), [[0, -1], [2, 3]], [[0, 1], [2, 0]]
    steps = [
        (([1, 2], [0, 1], [15, 29], TABLE), {}),
        (([3, 520], [0, 1], [16, 3], TABLE), {}),
        (([3, 4], [0, 1], [16, 30], TABLE), {}),
        (([3, 4], [0.0, 1.0], [16, 29], TABLE), {}),
        (([3, 4], [1, 0], [29, 15], short), {"ends": [-5, 16]}),
        (([3, 4], [1, 0], [29, 16], short), {}),
        (([3, 4], [0, 0], [3, 4], short), {"steps": 3}),
        (([3, 4], [0, 0], [4, 4], short), {}),
        (([3, 4], [0, 1], [3, 19], shared), {}),
        (([3, 4], [0, 1], [3, 18], shared), {}),
        (([3, 4], [0, 2], [3, 18], shared), {}),
        (([3], [0], [3], shared), {}),
    ]
    outcomes = [outcome(checks, *rows, **options) for rows, options in steps]
    assert outcomes == [outcome(make_checks(), *g, **options) for g, options in steps]
    are_errors = [isinstance(result, str) for result in outcomes]
    assert are_errors == [n in (1, 2, 3, 5, 7, 8, 10) for n in range(len(steps))]


def test_what_is_known_of_requests_ends_with_their_table():
    checks, short = make_checks(), [[0, -1], [2, 3]]
    pair, single = ([1, 2], [0, 1], [16, 16]), ([1], [0], [16])
    outcomes = [
        outcome(checks, *step_rows, TABLE) for step_rows in (pair, single, pair)
    ]
    assert [numbers[1] for numbers in outcomes] == [[16, 16], [16], [16, 16]]
    for rows in (single, pair):
        assert "below 16, on pages" in outcome(checks, *rows, short)


@pytest.mark.parametrize(
    ("lengths", "count"),
    [([16], 16), ([15], 0), ([1, 1, 16, 30], 46), ([40, 1], 0), ([40, 3, 16], 16)],
)
def test_rows_of_prompts_are_the_last_long_runs(lengths, count):
    pages = PageTable(4, 4, 16, 16)
    requests = np.repeat(np.arange(len(lengths)), lengths)
    positions = np.concatenate([np.arange(n) for n in lengths])
    checks = RowChecks(520, 64, 64, pages)
    table = np.arange(16).reshape(4, 4)
    rows = checks.check(0 * requests, requests, positions, table)
    assert rows.prompt_rows == count
    rows = checks.check(0 * requests, requests, positions, table, steps=2)
    assert rows.prompt_rows == 0


def test_rows_that_cannot_all_get_ids_need_outputs():
    checks = RowChecks(520, 2048, 1024, PageTable(1, 64, 16, 64))
    numbers, table = np.arange(513), np.arange(64)[None]
    rows = 0 * numbers, 0 * numbers, numbers, table
    with pytest.raises(ArgumentError, match="at most 512 rows that get ids") as caught:
        checks.check(*rows)
    assert caught.value.got == "513 rows without outputs="
    assert checks.check(*rows, outputs=1).outputs == 1


@pytest.mark.parametrize("ends", [[-(2**40)], np.array([-(2**40)])])
def test_an_end_has_no_lower_limit(ends):
    assert checked([1], [0], [5], ends=ends).numbers.tolist() == [[1], [5], [0], [0]]


@pytest.mark.mpi(ranks=[1])
def test_a_step_costs_the_host_few_calls(tmp_path, rng, one_rank, monkeypatch):
    folder, calls = make_model(tmp_path, rng), []
    rows = [1] * 8, list(range(8)), [0] * 8
    with load(folder, batch=8, positions=64, world=one_rank) as model:
        table = np.arange(8, dtype=np.int32)[:, None]
        model.step(*rows, table)
        monkeypatch.setattr(model.program, "launch", lambda bound: None)
        sys.setprofile(lambda frame, event, of: calls.append((event, of)))
        try:
            model.step(*rows, table)
        finally:
            sys.setprofile(None)
    python = [of for event, of in calls if event == "call"]
    assert len(python) < 60 and len(calls) < 300


class PinnedMemory(bytearray):
    """Memory of the host with an address."""

    @property
    def ptr(self):
        return ctypes.addressof((ctypes.c_char * len(self)).from_buffer(self))


class Memory(SimpleNamespace):
    """The part of CuPy that copies small arrays."""

    def memcpyAsync(self, to, source, size, kind, stream):
        ctypes.memmove(to, source, size)


def test_a_mirror_copies_by_the_stream(monkeypatch):
    def asarray(host):
        device = Memory(values=host.copy())
        device.data = Memory(ptr=device.values.ctypes.data)
        return device

    stream = Memory(ptr=0, synchronize=lambda: None)
    runtime = Memory(memcpyHostToDevice=1, memcpyDeviceToHost=2)
    cuda = Memory(runtime=runtime, get_current_stream=lambda: stream)
    cuda.alloc_pinned_memory = bytearray
    monkeypatch.setitem(sys.modules, "cupy", Memory(cuda=cuda, asarray=asarray))
    mirror = Mirror((2, 3), "cuda", -1)
    assert mirror.device.values.tolist() == [[-1] * 3] * 2
    mirror.host[1] = 5
    mirror.send()
    assert mirror.device.values.tolist() == [[-1] * 3, [5] * 3]


def test_a_host_array_is_written_in_place(monkeypatch):
    """The device's array has the address of the host's."""
    runtime = Memory(getDevice=lambda: 0)
    functions = {"UnownedMemory": lambda address, *_: address}
    functions["MemoryPointer"] = lambda place, offset: place + offset
    cuda = Memory(runtime=runtime, **functions)
    cuda.alloc_pinned_memory = PinnedMemory
    arrays = Memory(cuda=cuda, ndarray=lambda shape, dtype, place: place)
    monkeypatch.setitem(sys.modules, "cupy", arrays)
    array = HostArray((2, 3), "cuda", -1)
    ctypes.memset(array.device, 0, 12)
    assert array.host.tolist() == [[0] * 3, [-1] * 3]
