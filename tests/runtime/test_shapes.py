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
    made = GpuExecutor.__new__(GpuExecutor)
    made._numbers, made._templates, made._shapes = (
        itertools.count(),
        *map(Recent, (2, 3)),
    )
    made._fill = lambda dims, number: np.array([number])
    made._order = SimpleNamespace(enter=lambda s: None, leave=lambda s: None)
    made._function, made._shared, made.workers = SimpleNamespace(ptr=1), 0, 4
    driver = SimpleNamespace(launchKernel=lambda *_: None)
    made._cupy = SimpleNamespace(cuda=SimpleNamespace(driver=driver))
    made.world, made.plan = SimpleNamespace(rank=0), None
    made._status, made.finish = [1], lambda: None
    monkeypatch.setattr(gpu, "decode", lambda plan, control, dims, *_: [dims])
    return made


def launch(executor: GpuExecutor, n: int) -> int:
    """Run at a shape; returns its number on the device."""
    dims = {"n": n}
    shape, _ = executor._template(dims)
    made = SimpleNamespace(dims=dims, shape=shape, parameters=0)
    executor.launch(made, SimpleNamespace(ptr=5, is_capturing=lambda: False))
    return shape


def records(executor: GpuExecutor, shape: int) -> list:
    control = np.zeros(1, CONTROL)
    control["shape"], control["faults"] = shape, 1
    # The memory that captured graphs refer to has a control block of its own.
    controls = [np.zeros(1, CONTROL), control]
    executor._memory = [
        SimpleNamespace(control=SimpleNamespace(get=partial(one.view, np.uint8)))
        for one in controls
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
