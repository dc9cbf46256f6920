"""`GpuExecutor` with a stand-in of CuPy: its launches before and after it grows."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest

from etc_dist import World
from etc_dist.codegen import generate
from etc_dist.codegen.layout import CONTROL, EVENT_WAIT
from etc_dist.codegen.names import address_name
from etc_dist.runtime import gpu
from etc_dist.runtime.arrays import Array
from etc_dist.runtime.gpu import GpuExecutor, Launch
from etc_dist.schedule import schedule_static
from tests.graphs.ring import ring

pytestmark = pytest.mark.mpi(ranks=[1])
CAPTURING = SimpleNamespace(ptr=5, is_capturing=lambda: True)


class OnDevice(np.ndarray[Any, Any]):
    """A NumPy array with what is used of CuPy's."""

    @property
    def data(self) -> Any:
        return self

    @property
    def ptr(self) -> int:
        return self.ctypes.data

    def set(self, values: Any) -> None:
        self[...] = values

    def get(self) -> Any:
        return np.array(self)


def empty(count: int, dtype: Any = np.uint8) -> OnDevice:
    return np.full(count, 0xAB, dtype).view(OnDevice)


@pytest.fixture
def executor(world: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[GpuExecutor]:
    if world.backend != "cpu":
        pytest.skip("for the CPU backend")
    cupy = MagicMock(empty=empty, zeros=lambda *of: empty(*of) * 0)
    cupy.cuda.alloc_pinned_memory = empty
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    for name, stand_in in {
        "_load": lambda *_: (MagicMock(ptr=5), MagicMock(ptr=6)),
        "most_resident": MagicMock(),
        "resident_workers": lambda *_, **__: 4,
        "order_of": MagicMock(),
    }.items():
        monkeypatch.setattr(gpu, name, stand_in)
    plan = schedule_static(ring(world.size))
    gpu_executor = GpuExecutor(plan, world, generate(plan), MagicMock())
    yield gpu_executor
    gpu_executor.close()


def prepare(executor: GpuExecutor, rows: int) -> Launch | None:
    arrays = {n: Array(64, (), "", 0, "C", None, n) for n in ("x", "count", "y")}
    return executor.prepare(arrays, {"rows": rows})


def ready(executor: GpuExecutor, rows: int) -> Launch:
    if prepare(executor, rows) is None:
        executor.grow({"rows": rows})
    launch = prepare(executor, rows)
    assert launch is not None
    return launch


def places(launch: Launch) -> list[int]:
    names = "control", address_name("box")
    return [
        *launch.arguments["peer"].tolist(),
        *(int(launch.arguments[n]) for n in names),
    ]


def test_a_captured_launch_stays_valid_and_larger_ones_get_new_memory(executor, world):
    old = ready(executor, 8)
    executor.launch(old, CAPTURING)
    (first,) = executor._memory
    large = ready(executor, 800)
    assert places(old)[: world.size] == list(first.block.addresses)
    assert not set(places(old)[:-1]) & set(places(large)[:-1])
    assert not executor.is_current(old) and executor.is_current(large)
    again = ready(executor, 8)  # an eager run of the old shape
    assert places(again) == places(large)
    assert next(iter(executor._memory)) is first and executor.is_captured
    assert "kept for captured CUDA graphs" in executor.show()


def test_captures_in_any_order_allocate_once_where_the_largest_is_first(executor):
    for rows in (800, 8, 800, 400, 4):
        executor.launch(ready(executor, rows), CAPTURING)
    assert len(list(executor._memory)) == 1 and executor.show() == ""


def test_new_memory_begins_at_epoch_one_and_old_counters_are_not_touched(executor):
    executor.launch(ready(executor, 8), CAPTURING)
    (old,) = executor._memory
    old.control.view(CONTROL)["epoch"], old.block.local[0] = 7, 9
    ready(executor, 800)
    *_, latest = executor._memory
    assert latest.control.view(CONTROL)["epoch"] == 1 and not latest.block.local.any()
    assert old.control.view(CONTROL)["epoch"] == 7 and old.block.local[0] == 9


def test_a_fault_in_kept_memory_is_reported_and_all_memory_is_reset(executor, world):
    old = ready(executor, 8)
    executor.launch(old, CAPTURING)
    ready(executor, 800)
    first, latest = executor._memory
    control = first.control.view(CONTROL)[0]
    control["faults"], control["shape"] = 1, old.shape
    control["fault"][0] = (3, 0, 1, 0, EVENT_WAIT, 0, 0, 1)
    executor._status[0] = 1
    assert [record.worker for record in executor.failure()] == [3]
    world.barrier()
    executor.reset()
    assert executor.failure() is None and control["faults"] == 0
    for memory in (first, latest):
        assert memory.control.view(CONTROL)["epoch"] == 1
