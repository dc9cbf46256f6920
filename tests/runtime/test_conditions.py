"""Conditional waits and notifications, on both backends and under both schedules."""

from __future__ import annotations

import numpy as np
import pytest

import etc_dist
from etc_dist.ir import device_function
from etc_dist.runtime.cpu import simulate
from etc_dist.schedule import SCHEDULES
from tests.graphs.calls import one_call
from tests.graphs.running_sums import (
    KINDS,
    inputs,
    reference,
    running_sums,
    sums_over_ranks,
)
from tests.ops.arrays import Arrays


@device_function(source="", reads=2, writes=1)
def double(x, before, y):
    y[...] = 2 * (x if len(before) == 0 else before).sum(axis=1, keepdims=True)


DOUBLED = one_call(
    1,
    double,
    ["x 1 n float32", "y[span(maximum(layer - 1, 0), minimum(layer, 1)), :]"],
    ["y[tile(layer, 1), tile(j, 1)]"],
    dims="layers n",
    parts="""
        output y [layers, n] float32
        events ready [layers] expects n
    """,
    grid="j: n",
    loop="layer: layers",
    waits=["ready[layer - 1].when(layer > 0)"],
    notifies=["ready[layer].when(layer + 1 < layers)"],
)
"""y [layers, n]: each row is twice the sum of the row before, the first of x."""
on_schedules = pytest.mark.parametrize("schedule", ["static", "dynamic"])
all_kinds = pytest.mark.parametrize("kind", KINDS)


@on_schedules
@all_kinds
@pytest.mark.parametrize("n", [0, 1, 2, 11])
def test_tasks_wait_and_notify_where_their_conditions_hold(n, kind, schedule, seed):
    plan = SCHEDULES[schedule](running_sums(1, kind=kind))
    arrays = inputs(n, seed)
    run = simulate(plan, [arrays], {"n": n}, seed=seed, workers=3, epochs=2)
    np.testing.assert_array_equal(run.outputs[0]["y"], reference(arrays, kind))


@on_schedules
@pytest.mark.parametrize("layers", [0, 1, 4])
def test_turns_of_a_loop_need_no_event_before_and_after_them(layers, schedule, seed):
    plan, x = SCHEDULES[schedule](DOUBLED), np.ones((1, 3), np.float32)
    run = simulate(plan, [{"x": x}], {"layers": layers, "n": 3}, seed=seed, workers=2)
    expected = [[6.0 ** (layer + 1)] * 3 for layer in range(layers)]
    assert run.outputs[0]["y"].tolist() == expected


def rows_of_ranks(world_size):
    xs = [inputs(5, rank)["x"] for rank in range(world_size)]
    return xs, np.split(np.cumsum(np.concatenate(xs), axis=0), world_size)


@on_schedules
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_chain_over_ranks_has_one_text(world_size, schedule, seed):
    xs, expected = rows_of_ranks(world_size)
    plan, arrays = (
        SCHEDULES[schedule](sums_over_ranks(world_size)),
        [{"x": x} for x in xs],
    )
    run = simulate(plan, arrays, {"n": 5}, seed=seed, workers=2, epochs=2)
    for outputs, y in zip(run.outputs, expected, strict=True):
        np.testing.assert_array_equal(outputs["y"], y)


@pytest.mark.mpi(ranks=[4])
@on_schedules
def test_a_chain_over_ranks_fits_numpy(schedule, world):
    arrays, (xs, expected) = Arrays(world.backend), rows_of_ranks(world.size)
    graph = sums_over_ranks(world.size)
    with etc_dist.compile(graph, world, schedule=schedule) as program:
        for _ in range(3):
            y = program.run(x=arrays.put(xs[world.rank]))["y"]
            program.synchronize()
            np.testing.assert_array_equal(arrays.get(y), expected[world.rank])


@pytest.mark.mpi
@on_schedules
@all_kinds
def test_a_program_with_conditions_fits_numpy(kind, schedule, world):
    arrays = Arrays(world.backend)
    with etc_dist.compile(
        running_sums(world.size, kind=kind), world, schedule=schedule
    ) as program:
        for n in (1, 40, 17):
            operands = inputs(n, world.rank)
            y = program.run(**{k: arrays.put(v) for k, v in operands.items()})["y"]
            program.synchronize()
            np.testing.assert_array_equal(arrays.get(y), reference(operands, kind))
