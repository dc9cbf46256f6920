"""Waits for a GPU that stops responding, or fails."""

from __future__ import annotations

import time
from types import SimpleNamespace

import numpy as np
import pytest

from etc_dist.cache import Recent
from etc_dist.errors import WorldError
from etc_dist.runtime.gpu import GpuExecutor
from etc_dist.runtime.waiting import wait_for_call, wait_until

LIMIT = 0.05


class World(SimpleNamespace):
    """The parts of a world that `GpuExecutor` uses; `left` is a reason."""

    rank, device, left = 1, 3, ""
    settings = SimpleNamespace(world_limit=LIMIT)

    def leave(self, reason: str) -> None:
        self.left = reason


@pytest.fixture
def executor() -> GpuExecutor:
    """An executor without a GPU."""
    gpu_executor = GpuExecutor.__new__(GpuExecutor)
    gpu_executor.world, gpu_executor._shared, gpu_executor.workers = World(), 0, 4
    gpu_executor._function = SimpleNamespace(ptr=1)
    gpu_executor._order = SimpleNamespace(enter=lambda s: None, leave=lambda s: None)
    gpu_executor._stream, gpu_executor._shapes = None, Recent(4)
    gpu_executor.plan = SimpleNamespace(graph=SimpleNamespace(name="ring"))
    return gpu_executor


LAUNCH = SimpleNamespace(dims={}, shape=0, parameters=np.zeros(1).ctypes.data)
STREAM = SimpleNamespace(ptr=5, is_capturing=lambda: False)


def test_a_wait_without_end_names_the_gpu():
    for wait, never in ((wait_until, bool), (wait_for_call, lambda: time.sleep(1))):
        with pytest.raises(WorldError, match="GPU 3 does not answer[^$]*Xid"):
            wait(never, LIMIT, "GPU 3")


def test_the_wait_for_a_step_of_a_model_does_not_sleep(monkeypatch):
    monkeypatch.setattr("etc_dist.world.processes.time.sleep", pytest.fail)
    end = time.monotonic() + 0.02  # four times as long as other waits yield
    wait_until(lambda: time.monotonic() > end, limit=5.0, gpu="GPU 3")


def test_a_call_that_ends_in_time_raises_what_it_raises():
    wait_for_call(lambda: None, LIMIT, "GPU 3")
    with pytest.raises(ZeroDivisionError):
        wait_for_call(lambda: 1 / 0, LIMIT, "GPU 3")


def test_a_launch_that_fails_breaks_the_world_by_name(executor):
    def refuse(*_: object) -> None:
        raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS")

    driver = SimpleNamespace(launchKernel=refuse)
    executor._cupy = SimpleNamespace(cuda=SimpleNamespace(driver=driver))
    with pytest.raises(WorldError, match="RuntimeError: CUDA_ERROR_ILLEGAL") as caught:
        executor.launch(LAUNCH, STREAM)
    assert caught.value.what == "GPU 3 of rank 1 failed: a run was not launched"
    assert executor.world.left == caught.value.what


def test_a_stream_that_never_ends_breaks_the_world_by_name(executor):
    executor._order.is_done = lambda stream: False
    executor.synchronize()  # nothing was launched
    executor._stream = STREAM
    with pytest.raises(WorldError, match="GPU 3 of rank 1 does not answer"):
        executor.synchronize()
    assert executor.world.left == "GPU 3 of rank 1 does not answer"
