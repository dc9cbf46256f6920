"""How many workers had begun when a run on a GPU timed out."""

from __future__ import annotations

import numpy as np
import pytest

import etc_dist
from etc_dist import Program
from etc_dist.codegen.layout import CONTROL, EVENT_WAIT
from etc_dist.errors import WaitTimeoutError
from etc_dist.ir import GraphFunction
from etc_dist.runtime.device_faults import Record, decode
from etc_dist.schedule import schedule_static
from tests.conftest import LIMIT
from tests.emulate.cases import PART, copy_on
from tests.graphs.stages import copied
from tests.ops.arrays import Arrays
from tests.runtime.test_loads_errors import Ended


def copied_twice(ranks: int) -> GraphFunction:
    return copied(ranks, copies=2 * [(copy_on("tensor"), PART)])


def records(rank: int, num_begun: int) -> list[Record]:
    control = np.zeros(1, CONTROL)[0]
    control["faults"], control["resident"] = 1, num_begun
    control["fault"][0] = (5, 0, 1, 3, EVENT_WAIT, 0, 96, 132)
    return decode(
        schedule_static(copied_twice(1)), control, {"n": 132 * PART}, rank, 132
    )


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("num_begun", "text"),
    [
        (132, "; all workers had begun\n"),
        (96, "; rank 0: 96 of 132 workers had begun\n"),
    ],
)
def test_a_timeout_names_how_many_workers_had_begun(num_begun, text, short_timeout):
    faults = records(short_timeout.rank, 132 if short_timeout.rank else num_begun)
    executor, plan = (
        Ended(short_timeout, faults),
        schedule_static(copied_twice(short_timeout.size)),
    )
    program = Program(plan, short_timeout, executor, "", 0)
    arrays, executor.ends = Arrays(short_timeout.backend), True
    program.run(x=arrays.put_as(np.zeros(PART), "bfloat16"))
    with pytest.raises(WaitTimeoutError, match=text) as caught:
        program.synchronize()
    assert "if workers had not begun, end other work on that GPU" in caught.value.fix
    assert len(caught.value.records) == short_timeout.size
    executor.ends = False
    program.close()


SPIN = """extern "C" __global__ void spin(long long nanoseconds) {
  long long now, begin;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
  do asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  while (now - begin < nanoseconds);
}"""


@pytest.mark.gpu
@pytest.mark.mpi(ranks=[1])
def test_workers_that_other_work_keeps_from_beginning_are_counted(
    short_timeout, one_rank
):
    import cupy

    program = etc_dist.compile(copied_twice(1), short_timeout)
    parts = program.workers
    x = Arrays("cuda").put_as(np.zeros(parts * PART), "bfloat16")
    program.run(x=x)
    program.synchronize()
    spin = cupy.RawKernel(SPIN, "spin")
    spin.max_dynamic_shared_size_bytes = 220 << 10  # leaves no room for a worker
    with cupy.cuda.Stream(non_blocking=True):
        spin((1,), (1,), (int(4 * LIMIT * 1e9),), shared_mem=220 << 10)
    program.run(x=x)
    with pytest.raises(WaitTimeoutError, match=rf"{parts - 1} of {parts} workers had"):
        program.synchronize()
    program.run(x=x)
    program.synchronize()
    program.close()
