"""A failed run: the next call raises its error, on all ranks."""

from __future__ import annotations

import inspect
import subprocess
import sys
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import etc_dist
from etc_dist import Program, World
from etc_dist.errors import ArgumentError, WaitRecord, WaitTimeoutError, WorldError
from etc_dist.ir.graph import RESERVED
from etc_dist.schedule import Plan
from etc_dist.settings import Settings
from tests.graphs.ring import ring
from tests.ops.arrays import Arrays


class Ended:
    """The executor of a program whose last run was ended, until it is reset."""

    def __init__(self, executor: Any, rank: int):
        self._executor, self._rank, self._has_failed = executor, rank, True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def failure(self) -> list[WaitRecord] | None:
        if not self._has_failed:
            return None
        return [WaitRecord(self._rank, 0, "tensor", "take[0]", "here[0]", 0, 1)]

    def reset(self) -> None:
        self._has_failed = False
        self._executor.reset()


@pytest.fixture
def cpu_world() -> World:
    """A world that the test closes."""
    return etc_dist.start(Settings(backend="cpu", world_limit=5.0))


def ended(world: World, ranks: set[int]) -> Program:
    """A program whose last run was ended on these ranks."""
    program = etc_dist.compile(ring(world.size), world)
    run(program)
    if world.rank in ranks:
        program._last.executor = Ended(program._executor, world.rank)
    return program


def run(program: Program) -> None:
    put = Arrays(program.world.backend).put
    x, count = put(np.ones((8, 8), np.float32)), put(np.ones(4, np.int32))
    program.run(x=x, count=count)


NEXT: dict[str, Callable[[Program], None]] = {
    "run": run,
    "program.synchronize": Program.synchronize,
    "program.close": Program.close,
    "world.synchronize": lambda program: program.world.synchronize(),
    "world.close": lambda program: program.world.close(),
}


@pytest.mark.mpi
@pytest.mark.parametrize("call", NEXT)
def test_what_follows_a_run_that_was_ended_raises_it_once_on_all_ranks(call, cpu_world):
    program = ended(cpu_world, {cpu_world.size - 1})
    with pytest.raises(WaitTimeoutError) as caught:
        NEXT[call](program)
    assert caught.value.got.startswith(
        f"rank {cpu_world.size - 1}, worker 0, tensor lane: "
    )
    text = "".join(traceback.format_exception(caught.value))
    assert text.count("a run of ring was ended") == 1
    cpu_world.close()
    assert cpu_world.closed


@pytest.mark.mpi
def test_all_programs_are_waited_for_before_one_s_end_is_raised(cpu_world):
    first, second = ended(cpu_world, {0}), ended(cpu_world, {cpu_world.size - 1})
    with pytest.raises(WaitTimeoutError, match="rank 0, worker 0"):
        cpu_world.synchronize()
    cpu_world.synchronize()
    for program in (first, second):
        run(program)
    cpu_world.close()


@pytest.mark.mpi
def test_a_run_that_was_ended_is_raised_once_where_the_world_is_broken(cpu_world):
    program = ended(cpu_world, {cpu_world.rank})
    cpu_world.gather(0)  # all ranks have run it
    cpu_world.leave("a test")
    with pytest.raises(WaitTimeoutError):
        program.close()
    program.close()
    cpu_world.close()


@pytest.mark.mpi(ranks=[2])
def test_a_rank_that_waits_for_its_runs_alone_is_named(cpu_world):
    program = ended(cpu_world, set())
    with pytest.raises(ArgumentError, match=r"rank 0: the end of the last run of ring"):
        program.synchronize() if cpu_world.rank == 0 else run(program)
    run(program)
    cpu_world.close()


@pytest.mark.mpi
def test_a_closed_program_has_no_trace(cpu_world):
    program = ended(cpu_world, set())
    program.close()
    with pytest.raises(WorldError, match="the program is closed"):
        program.trace()
    cpu_world.close()


SCRIPT = """
import etc_dist
from tests.test_program_errors import ended
ended(etc_dist.start(), {0})
"""


def test_a_run_that_was_ended_is_printed_at_exit():
    command = [sys.executable, "-c", SCRIPT]
    process = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "[rank 0] etc_dist.errors.WaitTimeoutError: a run of ring" in process.stderr
    assert process.returncode != 0


@pytest.mark.parametrize("call", [Program.run, Program.show, Plan.show])
def test_parameters_of_calls_by_name_are_reserved(call):
    *parameters, _ = inspect.signature(call).parameters
    assert set(parameters) <= RESERVED
