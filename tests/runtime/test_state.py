"""States: arrays of the caller that a program reads and updates in place."""

from __future__ import annotations

import numpy as np
import pytest

from etc_dist.emulate import Emulator
from etc_dist.runtime.cpu import simulate
from etc_dist.schedule import SCHEDULES, schedule_static
from etc_dist.verify.verify import verify
from tests.graphs.accumulate import accumulate, arrays, expected
from tests.ops.arrays import Arrays

DIMS = {"n": 4, "rows": 6}
BOTH = pytest.mark.parametrize("schedule", ["static", "dynamic"])


@pytest.mark.mpi
@BOTH
def test_each_run_updates_the_array_of_the_caller(schedule, world, make_program):
    program = make_program(accumulate(world.size), schedule=schedule)
    backend = Arrays(world.backend)
    operands = arrays(world.rank)
    put = {name: backend.put(array.copy()) for name, array in operands.items()}
    for runs in (1, 2, 3):
        y = program.run(**put)["y"]
        program.synchronize()
        references = expected(operands, runs)
        np.testing.assert_array_equal(backend.get(y), references["y"])
        np.testing.assert_array_equal(backend.get(put["total"]), references["total"])


@BOTH
def test_a_simulation_returns_the_state_and_keeps_the_array(schedule, seed):
    plan, operands = SCHEDULES[schedule](accumulate(2)), [arrays(0), arrays(1)]
    results = simulate(plan, operands, DIMS, seed=seed, epochs=2).outputs
    for rank, outputs in enumerate(results):
        references = expected(arrays(rank), 2)
        np.testing.assert_array_equal(outputs["y"], references["y"])
        np.testing.assert_array_equal(outputs["total"], references["total"])
        np.testing.assert_array_equal(operands[rank]["total"], arrays(rank)["total"])


@BOTH
def test_the_emulator_returns_the_state_and_keeps_the_array(schedule):
    emulator, operands = Emulator(accumulate(1), schedule=schedule), arrays()
    outputs = emulator.run([operands], runs=2)[0]
    for name, array in expected(operands, 2).items():
        np.testing.assert_array_equal(outputs[name], array)
    np.testing.assert_array_equal(operands["total"], arrays()["total"])


def test_reads_before_and_after_a_write_are_proved():
    verified = verify(schedule_static(accumulate(2)), DIMS, 4)
    assert "call add_to_row, total[place[i] +: 1, :]" not in verified.show()
    assert any("total[place[i], :]" in what for what in verified.unchecked)
    tensors = {"place": [arrays(rank)["place"] for rank in range(2)]}
    assert verify(schedule_static(accumulate(2)), DIMS, 4, tensors).unchecked == ()
