"""`GpuExecutor` keeps a bounded number of shapes, and finds those of fault records."""

import itertools
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from etc_dist.cache import Recent
from etc_dist.codegen.layout import CONTROL
from etc_dist.runtime import gpu
from etc_dist.runtime.gpu import GpuExecutor


@pytest.fixture
def executor(monkeypatch) -> GpuExecutor:
    """An executor without a GPU, which keeps two templates and three shapes."""
    gpu_executor = GpuExecutor.__new__(GpuExecutor)
    gpu_executor._numbers, gpu_executor._templates, gpu_executor._shapes = (
        itertools.count(),
        *map(Recent, (2, 3)),
    )
    gpu_executor._fill = lambda dims, number: np.array([number])
    gpu_executor._order = SimpleNamespace(enter=lambda s: None, leave=lambda s: None)
    gpu_executor._function, gpu_executor._shared, gpu_executor.workers = (
        SimpleNamespace(ptr=1),
        0,
        4,
    )
    driver = SimpleNamespace(launchKernel=lambda *_: None)
    gpu_executor._cupy = SimpleNamespace(cuda=SimpleNamespace(driver=driver))
    gpu_executor.world, gpu_executor.plan = SimpleNamespace(rank=0), None
    gpu_executor._status, gpu_executor.finish = [1], lambda: None
    monkeypatch.setattr(gpu, "decode", lambda plan, control, dims, *_: [dims])
    return gpu_executor


def launch(executor: GpuExecutor, n: int) -> int:
    """Run at a shape; returns its number on the device."""
    dims = {"n": n}
    shape, _ = executor._template(dims)
    memory = SimpleNamespace(dims=dims, shape=shape, parameters=0)
    executor.launch(memory, SimpleNamespace(ptr=5, is_capturing=lambda: False))
    return shape


def records(executor: GpuExecutor, shape: int) -> list:
    control = np.zeros(1, CONTROL)
    control["shape"], control["faults"] = shape, 1
    # The memory that captured graphs refer to has a control block of its own.
    controls = [np.zeros(1, CONTROL), control]
    executor._memory = [
        SimpleNamespace(control=SimpleNamespace(get=partial(block.view, np.uint8)))
        for block in controls
    ]
    return executor.failure()


def test_a_shape_keeps_its_template_while_it_is_used(executor):
    assert [launch(executor, n) for n in (1, 2, 1, 3, 1, 2)] == [0, 1, 0, 2, 0, 3]


def test_records_name_the_shape_of_each_recent_run(executor):
    numbers = [launch(executor, n) for n in range(10)]
    assert numbers == list(range(10))  # none is used again
    assert [records(executor, n) for n in numbers[-3:]] == [
        [{"n": n}] for n in (7, 8, 9)
    ]
    assert records(executor, 6) == []
