"""After an aborted run, runs do nothing until the host resets the counters."""

from __future__ import annotations

import numpy as np
import pytest

from etc_dist.codegen.layout import ABORT_OFFSET
from etc_dist.emulate import Emulator
from etc_dist.errors import WaitTimeoutError
from etc_dist.ir.tensor import numpy_dtype
from tests.conftest import first_always
from tests.emulate.aborted import (
    PARTS,
    Aborted,
    check_skipped,
    copied_in_vain,
    sent_far_in_vain,
    sent_in_vain,
)
from tests.emulate.cases import PART


@pytest.mark.parametrize("schedule", ["static", "dynamic"])
def test_runs_after_an_aborted_one_change_nothing(schedule):
    graph = sent_in_vain(2, num_wanted=2)
    check_skipped(Emulator(graph, schedule=schedule))


@pytest.mark.parametrize("seed", first_always([(0,), (1,), (2,)], 1))
def test_after_a_reset_the_program_is_right_again(seed):
    runs = Aborted(Emulator(sent_in_vain(2)), seed)
    for _ in range(2):
        assert runs.run(3) == ""
        runs.reset()
        for arrays in runs.arrays:
            arrays["count"][:] = 1
        assert runs.run(3) == ""
        for rank, arrays in enumerate(runs.arrays):
            assert (arrays["y"] == runs.arrays[1 - rank]["x"]).all()
            assert runs.memory.control[rank]["epoch"] == 4
            arrays["count"][:] = 2


def test_an_abort_on_one_host_ends_the_run_on_the_other():
    graph = sent_far_in_vain(2, local_size=1)
    runs = Aborted(Emulator(graph, has_far=True), counts=(2, 1))
    assert runs.run(1) == ""
    assert [int(c["faults"][0]) for c in runs.memory.control] == [1, 0]
    for rank in range(2):
        assert runs.words(rank)[ABORT_OFFSET // 4] > 0
        assert runs.far_area(rank, 1)[:2].tolist() == [1, 0]
        assert runs.area(rank, 1)[:2].tolist() == [0, 1]
    runs.reset()
    runs.arrays[0]["count"][:] = 1
    assert runs.run(3) == ""
    for rank, arrays in enumerate(runs.arrays):
        assert (arrays["y"] == runs.arrays[1 - rank]["x"]).all()
        assert runs.words(rank)[ABORT_OFFSET // 4] == 0


def test_an_abort_of_one_rank_reaches_all_ranks_of_all_hosts():
    graph = sent_far_in_vain(4, local_size=2)
    program = Emulator(graph, has_far=True, workers=1)
    runs = Aborted(program, counts=(1, 1, 1, 1))
    runs.words(0)[ABORT_OFFSET // 4] = 1  # as a message of rank 2
    assert runs.run(1) == ""
    assert all(runs.words(rank)[ABORT_OFFSET // 4] > 0 for rank in range(4))


@pytest.mark.parametrize("reserved", [1, 2**30])
def test_slots_that_do_not_fit_the_queue_are_not_stored(reserved):
    graph = sent_in_vain(2, num_wanted=1)
    runs = Aborted(Emulator(graph, schedule="dynamic"))
    places = runs.memory._arguments[0]
    for rank in range(2):
        runs.area(rank, 1)[places["tail_transfer"]] = reserved
    assert runs.run(1) == ""
    assert sum(control["faults"][0] for control in runs.memory.control) > 0
    for rank in range(2):
        unused = places["slots_transfer"] + PARTS
        assert not runs.area(rank, 1)[unused:].any()


@pytest.mark.parametrize("workers", [2, 8])
@pytest.mark.parametrize("lane", ["tensor", "transfer"])
def test_the_wait_that_is_the_cause_is_named(lane, workers):
    """Whichever wait reaches its limit first: those for queued tasks follow from it."""
    graph = copied_in_vain(lane)
    program = Emulator(graph, schedule="dynamic", workers=workers)
    x = np.zeros(4 * PART, numpy_dtype("bfloat16"))
    for seed in range(4):
        cause = r"copy_1\[\d\] waits for copied_0\[0\]: have 4, want 5"
        with pytest.raises(WaitTimeoutError, match=cause):
            program.run([{"x": x}], {"n": 4 * PART}, seed=seed)
