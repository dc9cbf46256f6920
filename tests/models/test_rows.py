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
from etc_dist.models.rows import RowArrays, check_rows
from etc_dist.models.sampling import Sampling
from tests.models.small import make_model

TABLE = np.array([[0, 1], [2, 3]])


def checked(ids, requests, positions, table=TABLE, **options):
    limits = {"vocabulary": 520, "most_rows": 8, "most_positions": 30}
    given = {"steps": 1, "ends": None, "stops": None, "sampling": None, **options}
    pages = PageTable(2, 2, 16, 4)
    return check_rows(ids, requests, positions, table, **given, **limits, pages=pages)


def test_rows_that_are_not_used_belong_to_no_request():
    arrays = RowArrays((2, 2), "cpu")
    more = {"stops": [{4}, {5}, {6}], "sampling": 3 * [Sampling(seed=2)]}
    arrays.fill(checked([1, 2, 3], [0, 1, 0], [5, 6, 7], **more), 4, 1)
    found = arrays.fill(checked([8, 9], [1, 0], [3, 2]), 4, 1)
    assert found["ids"][0].tolist() == [8, 9, -1, -1]
    assert found["position"][0].tolist() == [3, 2, -1, -1]
    assert found["request"].tolist() == [1, 0, 0, 0]
    assert found["end"].tolist() == [4, 3, 0, 0]
    assert np.all(found["stop"] == -1) and np.all(found["sampling"] == 0)
    assert found["table"].tolist() == TABLE.tolist()


def test_a_table_that_changes_in_place_is_seen():
    arrays, table = RowArrays((2, 2), "cpu"), TABLE.copy()
    pages = PageTable(2, 2, 16, 4)
    assert pages.examine(table) is pages.examine(table.copy())
    table[0, 1] = 7
    assert pages.examine(table).positions.tolist() == [16, 32]
    assert arrays.fill(checked([1], [1], [0]), 1, 1)["table"].tolist() == TABLE.tolist()


@pytest.mark.parametrize(
    ("rows", "options", "text"),
    [
        (([2**40], [0], [0]), {}, f"ids: {2**40}"),
        ((np.array([2**64 - 1], np.uint64), [0], [0]), {}, "ids: "),
        (([1], [2**40], [0]), {"steps": 2}, f"requests: {2**40}"),
        (([1], [0], [30]), {}, "positions: 30"),
        (([1], [0], [29]), {"ends": [31]}, "ends: 31"),
        (([1], [0], [0]), {"ends": [17], "table": [[0, -1]]}, "pages: -1"),
        (([1], [1], [0]), {"table": [[0]]}, "requests: 1"),
        (([1], [0], [0]), {"stops": [{1}, {2}]}, "stops of 2"),
        (([1], [0], [0]), {"stops": [set(range(9))]}, "9"),
        (([1, 2], [0, 0], [0, 1]), {"ends": [2, 2]}, "row 1 and one before it"),
    ],
)
def test_numbers_out_of_range_are_named(rows, options, text):
    with pytest.raises(ArgumentError, match=text):
        checked(*rows, **options)


@pytest.mark.mpi(max_size=1)
def test_a_step_costs_the_host_few_calls(tmp_path, rng, one_rank, monkeypatch):
    folder, calls = make_model(tmp_path, rng), []
    rows = [1] * 8, list(range(8)), [3] * 8
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
    made = {"UnownedMemory": lambda address, *_: address}
    made["MemoryPointer"] = lambda place, offset: place + offset
    cuda = Memory(runtime=runtime, **made)
    cuda.alloc_pinned_memory = PinnedMemory
    arrays = Memory(cuda=cuda, ndarray=lambda shape, dtype, place: place)
    monkeypatch.setitem(sys.modules, "cupy", arrays)
    found = HostArray((2, 3), "cuda", -1)
    ctypes.memset(found.device, 0, 12)
    assert found.host.tolist() == [[0] * 3, [-1] * 3]
