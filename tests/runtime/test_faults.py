"""Failed runs: every rank raises the same kind of error, and the next run works.

The same tests run on both backends. On the CPU a failed run raises; on GPUs the next
agreement of the ranks does."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import etc_dist
from etc_dist import Program, World
from etc_dist.errors import WaitRecord, WaitTimeoutError
from tests.conftest import LIMIT, has_gpu
from tests.graphs.ring import ring
from tests.ops.arrays import Arrays

ROOT = Path(__file__).parents[2]


@pytest.fixture
def compiled(short_timeout) -> Iterator[Callable[..., Program]]:
    programs: list[Program] = []

    def compiled(schedule: str = "static", **options: Any) -> Program:
        graph = ring(short_timeout.size, **options)
        programs.append(etc_dist.compile(graph, short_timeout, schedule=schedule))
        return programs[-1]

    yield compiled
    for program in programs:
        program.close()


@pytest.fixture
def run(short_timeout) -> Callable[..., list[float]]:
    """Runs a program to its end; the first column of y."""
    arrays = Arrays(short_timeout.backend)

    def run(program: Program, count: int = 1) -> list[float]:
        x = np.full((8, 8), short_timeout.rank, np.float32)
        counts = np.full(4, count, np.int32)
        y = program.run(x=arrays.put(x), count=arrays.put(counts))["y"]
        program.synchronize()
        return arrays.get(y)[:, 0].tolist()

    return run


def previous(world: World) -> list[float]:
    return [float((world.rank - 1) % world.size)] * 8


def timed_out(act: Callable[[], object]) -> tuple[WaitRecord, ...]:
    """The records of the error that `act` must raise on this rank."""
    with pytest.raises(WaitTimeoutError) as caught:
        act()
    assert f"within {LIMIT:g} s" in caught.value.wanted
    return caught.value.records


def waits(records: tuple[WaitRecord, ...]) -> list[tuple[int, str, str, int, int]]:
    return sorted((r.rank, r.task, r.event, r.have, r.want) for r in records)


@pytest.mark.mpi(ranks=[2])
def test_a_missing_notify_is_named_on_every_rank(compiled, run, short_timeout):
    program = compiled(notifies=False)
    records = timed_out(lambda: run(program))
    unmet = [
        (rank, f"take[{i}]", f"here[{i}]", 0, 1)
        for rank in range(short_timeout.size)
        for i in (0, 1)
    ]
    # The first wait that times out ends the run, possibly before others are recorded.
    assert waits(records) and set(waits(records)) <= set(unmet)
    assert {record.lane for record in records} <= {"tensor", "transfer"}
    assert all(0 <= record.worker < program.workers for record in records)
    assert run(compiled()) == previous(short_timeout)


@pytest.mark.mpi(ranks=[2])
def test_a_timeout_in_a_queue_names_the_event(compiled, run, short_timeout):
    program = compiled("dynamic", num_expected=2)
    for _ in range(2):
        records = timed_out(lambda: run(program))
        unmet = [
            (rank, f"take[{i}]", f"here[{i}]", 1, 2)
            for rank in range(short_timeout.size)
            for i in (0, 1)
        ]
        assert waits(records) and set(waits(records)) <= set(unmet)
    assert run(compiled("dynamic", num_expected=1)) == previous(short_timeout)


@pytest.mark.mpi
def test_the_same_program_runs_again_after_a_timeout(compiled, run, short_timeout):
    program = compiled()
    for _ in range(2):
        assert run(program) == previous(short_timeout)
        records = timed_out(lambda: run(program, count=3))
        assert {(record.have, record.want) for record in records} == {(1, 3)}
    assert run(program) == previous(short_timeout)


@pytest.mark.mpi(ranks=[2])
def test_a_timeout_of_one_rank_is_an_error_on_all(compiled, run, short_timeout):
    program = compiled()
    last = short_timeout.size - 1
    count = 2 if short_timeout.rank == last else 1
    records = timed_out(lambda: run(program, count))
    unmet = [(last, f"take[{i}]", f"here[{i}]", 1, 2) for i in (0, 1)]
    assert waits(records) and set(waits(records)) <= set(unmet)
    assert run(program) == previous(short_timeout)


@pytest.mark.mpi(ranks=[2])
def test_the_next_call_reports_a_failed_run(compiled, run, short_timeout):
    program, arrays = compiled(), Arrays(short_timeout.backend)
    x = arrays.put(np.zeros((8, 8), np.float32))
    counts = [arrays.put(np.full(4, count, np.int32)) for count in (2, 1)]

    def twice() -> None:
        program.run(x=x, count=counts[0])
        time.sleep(2 * LIMIT)
        program.run(x=x, count=counts[1])

    assert {record.want for record in timed_out(twice)} == {2}
    assert run(program) == previous(short_timeout)


@pytest.mark.mpi(ranks=[2])
def test_a_late_call_is_not_an_error(compiled, run, short_timeout):
    program = compiled()
    for late in (0, short_timeout.size - 1):
        if short_timeout.rank == late:
            time.sleep(1.25 * LIMIT)
        # The ranks agree before the launch; no wait begins earlier.
        assert run(program) == previous(short_timeout)


# ------------------------------------------------------------------ ranks that die

LOOP = """
import os, signal, sys
import etc_dist
from etc_dist.functions import sum_ranks
from etc_dist.ops.operation import with_sizes
from etc_dist.ops.tile_model import FAMILY
from tests.ops.arrays import Arrays
from tests.graphs.ring import ring
import numpy as np

world = etc_dist.start()
death = sys.argv[1] if world.rank == 1 else ""
calls = 0

def body(partials):
    if death == "inside" and calls == 20:
        os._exit(1)
    return body.original(partials)

body.original = sum_ranks.sum_in_order
sum_ranks.sum_in_order = body
# With a size, few rows are multiplied by the graph of many, which has this body.
op = with_sizes(etc_dist.MatmulReduceScatter, shapes=FAMILY)(world=world)
x, w = (Arrays(world.backend).put(np.ones((16, 16), np.float16)) for _ in "xw")
while calls < 1000:
    calls += 1
    op(x, w)
    if calls == 20 and death == "exit":
        os._exit(1)
    if calls == 20 and death == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
op.synchronize()
print("the loop came to its end")
"""


@pytest.mark.parametrize(
    "death", ["kill", "inside", pytest.param("exit", marks=pytest.mark.exhaustive)]
)
def test_ranks_that_survive_a_death_raise_a_named_error(death, tmp_path):
    script = tmp_path / "loop.py"
    script.write_text(LOOP)
    mpirun = [sys.executable, str(ROOT / "launch" / "mpirun"), "-n", "2"]
    variables = {"LAUNCH_PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    variables["ETC_DIST_WAIT_LIMIT"] = "1"  # of waits inside a run
    # Only the CPU backend runs Python bodies.
    if death == "inside" or not has_gpu():
        variables["ETC_DIST_BACKEND"] = "cpu"
    elif "CUDA_MPS_PIPE_DIRECTORY" in os.environ:
        pytest.skip("a client killed inside a kernel leaves the MPS server unusable")
    process = subprocess.run(
        [*mpirun, "--time-limit", "60", str(script), death],
        env=os.environ | variables,
        capture_output=True,
        text=True,
    )
    assert "the loop came to its end" not in process.stdout and process.returncode != 0
    errors = ("etc_dist.errors.WorldError: ", "etc_dist.errors.WaitTimeoutError: ")
    lines = [line for line in process.stderr.splitlines() if "[rank 0]" in line]
    assert any(error in line for error in errors for line in lines), process.stderr
    assert "rank 1" in "\n".join(lines)
