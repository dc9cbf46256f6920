"""Loops: layers and steps run turn by turn, with the results of NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from etc_dist.emulate import Emulator
from etc_dist.runtime.cpu import simulate
from etc_dist.schedule import SCHEDULES
from tests.ops.arrays import Arrays
from tests.runtime.looped import (
    dims_of,
    expected,
    inputs,
    residual_layers,
    stepped,
    steps_of_layers,
)

BOTH = pytest.mark.parametrize("schedule", ["static", "dynamic"])
LAYERS = 4


def check(found, wanted):
    for outputs, arrays in zip(found, wanted, strict=True):
        for name, array in arrays.items():
            np.testing.assert_allclose(outputs[name], array, rtol=1e-4, atol=1e-5)


@pytest.mark.mpi(max_size=2)
@BOTH
def test_layers_run_on_all_ranks(schedule, world, make_program):
    program = make_program(residual_layers(world.size), schedule=schedule)
    backend = Arrays(world.backend)
    for layers in (LAYERS, 1, 7):
        given = inputs(layers, world.size)
        put = {n: backend.put(a.copy()) for n, a in given[world.rank].items()}
        y = program.run(**put)["y"]
        program.synchronize()
        found = {"y": backend.get(y), "kept": backend.get(put["kept"])}
        check([found], [expected(given)[world.rank]])


@BOTH
@pytest.mark.parametrize("world_size", [1, 2])
def test_layers_run_in_any_order_of_workers(world_size, schedule, seed):
    plan = SCHEDULES[schedule](residual_layers(world_size))
    given, dims = inputs(LAYERS, world_size), dims_of(LAYERS, world_size)
    for workers in (1, 3):
        run = simulate(plan, given, dims, seed=seed, workers=workers)
        check(run.outputs, expected(given))


@BOTH
@pytest.mark.parametrize("world_size", [1, 2])
def test_the_kernels_run_layers(world_size, schedule):
    emulator = Emulator(residual_layers(world_size), schedule=schedule, workers=3)
    for layers in (LAYERS, 1):
        given = inputs(layers, world_size)
        for seed in range(2):
            check(emulator.run(given, seed=seed), expected(given))


@BOTH
def test_loops_inside_of_loops(schedule):
    emulator = Emulator(steps_of_layers(1), schedule=schedule, workers=2)
    x = np.arange(4, dtype=np.float32)
    for steps, layers in ((2, 3), (3, 1), (1, 2)):
        given = [{"x": x, "sizes": np.zeros((steps, layers, 4), np.float32)}]
        dims = {"steps": steps, "layers": layers}
        wanted = [{"y": stepped(x, steps, layers)}]
        check(emulator.run(given), wanted)
        check(simulate(emulator.plan, given, dims).outputs, wanted)
