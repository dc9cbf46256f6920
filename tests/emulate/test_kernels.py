"""The kernels' own text, run thread by thread: layers and collectives against NumPy, at
shapes of every kind of tile and under either schedule, with --all the same bits for
other orders of events, and no two accesses without one."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from etc_dist.emulate import Emulator
from etc_dist.ir import GraphFunction
from tests.emulate.cases import SEEDS, check, copy_on, set_some, some_numbers
from tests.emulate.matrix import CASES
from tests.graphs.calls import Task, calls
from tests.graphs.dense import own_rows
from tests.layers.reference import draw

exhaustive = pytest.mark.exhaustive
SCHEDULES = ["static", "dynamic"]


def matrix() -> list[Any]:
    """Each program under either schedule; most are exhaustive."""
    return [
        pytest.param(case, schedule, marks=marks, id=f"{name}-{schedule}")
        for name, case in CASES.items()
        for schedule in SCHEDULES
        for marks in [[] if schedule in case.always else [exhaustive]]
    ]


@pytest.mark.parametrize(("case", "schedule"), matrix())
def test_program_gives_the_reference(case, schedule, kernels, pytestconfig):
    options = {"schedule": schedule, "workers": case.workers}
    program = Emulator(case.graph(), kernels=kernels, **options)
    # One order without --all: that of seed 0, with a second run, where ranks may begin
    # it early, or which has tickets that the first one clears.
    has_two = program.plan.graph.world_size > 1 or schedule == "dynamic"
    seeds = SEEDS if pytestconfig.getoption("--all") else [0 if has_two else 1]
    check(program, *case.make_example(), case.dtype, seeds)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("lane", ["tensor", pytest.param("transfer", marks=exhaustive)])
def test_a_task_with_nothing_left_runs_no_body(schedule, lane):
    arrays, expected = some_numbers()
    program = Emulator(set_some(1, lane=lane), schedule=schedule)
    del arrays["y"]
    [outputs] = program.run([arrays], {"n": len(expected)})
    assert (outputs["y"] == expected).all()


ROWS, COLUMNS = 16, 256


def matmuls_of_few_rows() -> GraphFunction:
    """y = (x w) v in tiles, most of them empty. The event that a task of the second
    GEMM notifies is loaded from memory that another lane has written."""
    parts = f"""
        let columns = ceildiv(n, {COLUMNS})
        input sizes [count] int32
        local to [count] int32
        local half [count * {ROWS}, k] bfloat16
        input x [count * {ROWS}, k] bfloat16
        output y [count * {ROWS}, n] bfloat16
        events known [count] expects 1
        events begun [count] expects 1
        events done [count] expects columns
    """
    rows = f"span(r * {ROWS}, minimum({ROWS}, sizes.load(r)))"
    every, by_row = f"span(0, minimum({COLUMNS}, k))", {"grid": "r: count"}
    tasks = [
        Task(
            copy_on("transfer"),
            ["given count[span(r, 1)] int32"],
            ["to[span(r, 1)]"],
            notifies=["known[r]"],
            order="count - 1 - t",
            **by_row,
        ),
        Task(
            partial(own_rows, name="first"),
            [f"x[{rows}, :]", f"w 1[0] k[{every}] k bfloat16"],
            [f"half[{rows}, {every}]"],
            name="first",
            notifies=["begun[r]"],
            **by_row,
        ),
        Task(
            partial(own_rows, name="second"),
            [f"half[{rows}, :]", f"v 1[0] n[tile(j, {COLUMNS})] k bfloat16"],
            [f"y[{rows}, tile(j, {COLUMNS})]"],
            name="second",
            grid="j: columns, r: count",
            waits=["begun[r]", "known[r]"],
            notifies=["done[to.load(r)]"],
        ),
        Task(
            copy_on("transfer"),
            ["sizes[span(r, 1)]"],
            ["seen count[span(r, 1)] int32"],
            name="end",
            waits=["done[r]"],
            **by_row,
        ),
    ]
    return calls(1, tasks=tasks, dims="count k n", parts=parts)


@pytest.mark.parametrize(
    "schedule", ["dynamic", pytest.param("static", marks=exhaustive)]
)
def test_groups_of_empty_tasks_notify_what_is_loaded(schedule):
    count, k, n = 40, 64, 264
    rng = np.random.default_rng(6)
    sizes = np.zeros(count, np.int32)
    sizes[:2] = 5, 6
    order = rng.permutation(count).astype(np.int32)
    x, w, v = (
        draw(rng, s, "bfloat16") for s in ((count * ROWS, k), (1, k, k), (1, n, k))
    )
    w, v = np.sign(w), np.sign(v)
    program = Emulator(matmuls_of_few_rows(), schedule=schedule, workers=2)
    inputs = {"sizes": sizes, "given": order, "x": x, "w": w, "v": v}
    for seed in range(2):
        dims = {"count": count, "k": k, "n": n}
        [outputs] = program.run([inputs], dims, seed=seed, runs=2)
        y, end_sizes = outputs["y"], outputs["seen"]
        half = (x.astype(np.float32) @ w[0].astype(np.float32).T).astype(x.dtype)
        whole = half.astype(np.float32) @ v[0].astype(np.float32).T
        live = np.concatenate([np.arange(s) + r * ROWS for r, s in enumerate(sizes)])
        assert np.allclose(y[live].astype(np.float32), whole[live], rtol=1e-2, atol=0.5)
        assert np.isnan(np.delete(y, live, 0).astype(np.float32)).all()
        assert (end_sizes == sizes).all()
