"""Ranks that agree to a call and launch it late or never: every rank raises
WaitTimeoutError, and the next run is correct.

The agreement on a call waits for late ranks. So here a rank is late between the
agreement and its launch."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import FunctionType
from typing import Any

import numpy as np
import pytest

import etc_dist
from etc_dist import Program
from etc_dist.errors import WaitTimeoutError
from tests.conftest import LIMIT
from tests.graphs.ring import ring
from tests.ops.arrays import Arrays

LATE = 2 * LIMIT
"""Seconds."""
Launch = Callable[..., None]


def never(launch: Launch, *call: Any) -> None:
    """A rank that does not launch."""


def late(launch: Launch, *call: Any) -> None:
    time.sleep(LATE)
    launch(*call)


def stopped(launch: Launch, *call: Any) -> None:
    """A rank whose process is stopped, and continues later."""
    wake = f"sleep {LATE}; kill -CONT {os.getpid()}"
    with subprocess.Popen(["sh", "-c", wake]):
        os.kill(os.getpid(), signal.SIGSTOP)
    launch(*call)


def of_package(function: Callable[..., None]) -> Callable[..., None]:
    """The function as one of the package: user code may not call inside a call."""
    module = {**globals(), "__name__": f"etc_dist.{function.__name__}"}
    return FunctionType(function.__code__, module)


@pytest.fixture
def program(short_timeout, schedule) -> Iterator[Program]:
    graph = ring(short_timeout.size, num_expected=1)
    program = etc_dist.compile(graph, short_timeout, schedule=schedule)
    yield program
    program.close()


@pytest.fixture
def run(short_timeout, program) -> Callable[[], list[float]]:
    """Runs the program to its end; the first column of y."""
    arrays = Arrays(short_timeout.backend)
    x = arrays.put(np.full((8, 8), short_timeout.rank, np.float32))
    count = arrays.put(np.ones(4, np.int32))

    def run() -> list[float]:
        y = program.run(x=x, count=count)["y"]
        program.synchronize()
        return arrays.get(y)[:, 0].tolist()

    return run


@pytest.mark.mpi(ranks=[2])
@pytest.mark.parametrize(
    ("how", "schedule"), [(never, "static"), (late, "dynamic"), (stopped, "static")]
)
def test_rank_that_agrees_and_does_not_launch_in_time(
    how, program, run, short_timeout, monkeypatch
):
    expected = [float((short_timeout.rank - 1) % short_timeout.size)] * 8
    for odd in (short_timeout.size - 1, 0):
        assert run() == expected
        with monkeypatch.context() as patch:
            if short_timeout.rank == odd:
                executor = program._executor
                odd_launch = partial(of_package(how), executor.launch)
                patch.setattr(executor, "launch", odd_launch)
            with pytest.raises(WaitTimeoutError) as caught:
                run()
        assert f"within {LIMIT:g} s" in caught.value.wanted
        assert caught.value.records
        assert run() == expected


@pytest.mark.mpi(ranks=[2])
@pytest.mark.parametrize("schedule", ["static", "dynamic"])
def test_rank_that_did_not_launch_gets_the_error_at_its_next_call(
    program, run, short_timeout, monkeypatch
):
    expected = run()
    arrays = Arrays(short_timeout.backend)
    x = arrays.put(np.zeros((8, 8), np.float32))
    count = arrays.put(np.ones(4, np.int32))

    def twice() -> None:
        program.run(x=x, count=count)
        time.sleep(LATE)
        program.run(x=x, count=count)

    with monkeypatch.context() as patch:
        if short_timeout.rank == 0:
            patch.setattr(program._executor, "launch", lambda *call: None)
        with pytest.raises(WaitTimeoutError):
            twice()
    assert run() == expected
