"""The CPU backend with all ranks in one process: results, orders, epochs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etc_dist.errors import ArgumentError, GraphError
from etc_dist.ir import Symbol, device_function
from etc_dist.runtime.cpu import simulate
from etc_dist.runtime.cpu.simulate import ProcessMemory
from etc_dist.schedule import schedule_dynamic, schedule_static
from tests.conftest import some_of
from tests.emulate.cases import four_matmuls
from tests.graphs.calls import Task, calls, one_call
from tests.graphs.ring import doubled_ring
from tests.graphs.written import three_matmuls
from tests.runtime.programs import OPS, case, plan_of, ring_inputs


@pytest.mark.parametrize(
    "world",
    [1, 2, 3, 8, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in range(4, 8))],
)
@pytest.mark.parametrize("op", OPS)
def test_every_world_size_gives_the_reference(op, world, rng, seed):
    c = case(op, world, rng)
    run = simulate(c.plan, c.inputs, c.dims, seed=seed)
    for rank in range(world):
        c.check(rank, run.outputs[rank]["y"])


@pytest.mark.parametrize("w_layout", ["nk", "kn"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("op", OPS)
def test_dtypes_and_layouts_give_the_reference(op, dtype, w_layout, rng, seed):
    c = case(op, 3, rng, (20, 24, 40), dtype, w_layout)
    run = simulate(c.plan, c.inputs, c.dims, seed=seed)
    for rank in range(3):
        assert str(run.outputs[rank]["y"].dtype) == dtype
        c.check(rank, run.outputs[rank]["y"])


def test_different_matmuls_in_one_program(seed):
    inputs, [answer], dims = four_matmuls(300, 264, 200)
    plan = schedule_static(three_matmuls(1))
    [outputs] = simulate(plan, inputs, dims, seed=seed).outputs
    answer.check(outputs["y"], "bfloat16")


@given(
    op=st.sampled_from(OPS),
    world=st.integers(1, 8),
    dims=st.tuples(st.integers(1, 37), st.integers(1, 37), st.integers(1, 37)),
    workers=st.sampled_from([2, 4, 6]),
    epochs=st.integers(1, 2),
    seed=st.integers(0, 2**32 - 1),
)
def test_odd_shapes_give_the_reference(op, world, dims, workers, epochs, seed):
    c = case(op, world, np.random.default_rng(seed), dims)
    run = simulate(c.plan, c.inputs, c.dims, seed=seed, workers=workers, epochs=epochs)
    for rank in range(world):
        c.check(rank, run.outputs[rank]["y"])


@pytest.mark.parametrize("op", OPS)
def test_every_order_gives_the_same_bits(op, rng):
    c = case(op, 4, rng, (40, 24, 16), "bfloat16")
    runs = [simulate(c.plan, c.inputs, c.dims, seed=n, check=not n) for n in range(8)]
    assert len({tuple(t.label for t in run.tasks) for run in runs}) == 8
    for rank in range(4):
        assert len({run.outputs[rank]["y"].tobytes() for run in runs}) == 1


def test_a_seed_repeats_its_order_of_tasks(rng):
    c = case("matmul_reduce_scatter", 3, rng)
    runs = [simulate(c.plan, c.inputs, c.dims, seed=seed) for seed in (5, 5, 6)]
    orders = [[(t.rank, t.call, t.task) for t in run.tasks] for run in runs]
    assert orders[0] == orders[1] != orders[2]


@pytest.mark.parametrize("seed", some_of(range(6), 3))
@pytest.mark.parametrize("op", OPS)
def test_three_epochs_without_a_barrier(op, seed, rng):
    c = case(op, 3, rng)
    run = simulate(c.plan, c.inputs, c.dims, seed=seed, epochs=3)
    for rank in range(3):
        c.check(rank, run.outputs[rank]["y"])
    once = simulate(c.plan, c.inputs, c.dims, seed=seed)
    assert len(run.tasks) == 3 * len(once.tasks)


def test_without_the_handshake_epochs_race(rng, monkeypatch):
    c = case("all_gather_matmul", 2, rng)
    monkeypatch.setattr(ProcessMemory, "started", lambda self, rank: 99)
    faults = 0
    for seed in range(10):
        try:
            simulate(c.plan, c.inputs, c.dims, seed=seed, epochs=3)
        except GraphError:
            faults += 1
    assert faults >= 8


def test_a_small_program_gives_literal_values():
    plan = schedule_static(doubled_ring(2))
    inputs = [ring_inputs(rank, 8) for rank in range(2)]
    run = simulate(plan, inputs, {"rows": 8}, workers=1)
    assert run.outputs[0]["y"].tolist() == [200, 202, 204, 206, 208, 210, 212, 214]
    assert run.outputs[1]["y"].tolist() == [0, 2, 4, 6, 8, 10, 12, 14]


@device_function(source="", reads=0, writes=1)
def write_place(y, *, rank, rows, half, i=7, offset=0):
    y[...] = (rank, rows, half, i + offset)


@pytest.mark.parametrize("schedule", [schedule_static, schedule_dynamic])
def test_body_gets_dims_and_coordinates_by_name(schedule):
    """y [rows, 4] is where each task runs."""
    half, y = "let half = rows // 2", "y rows[span(i, 1)] 4 int32"
    options = {"dims": "rows", "parts": half, "grid": "i: rows"}
    plan = schedule(one_call(2, write_place, writes=[y], **options))
    run = simulate(plan, [{}, {}], {"rows": 5})
    for rank, outputs in enumerate(run.outputs):
        assert outputs["y"].tolist() == [[rank, 5, 2, i] for i in range(5)]


@device_function(source="", reads=0, writes=0)
def start_rows():
    pass


@device_function(source="", reads=0, writes=1)
def write_one(y):
    y[...] = 1


def test_a_loaded_extent_beside_an_axis_of_one_task():
    """The first rows of y [3, 1] become 1, as many as count says."""
    parts = """
        input count [1] int32
        state y [3, 1] float32
        events known [1] expects 1
        events ready [3, 1] expects 1
    """
    grid, count_event = {"grid": "i: up_to(3, count.load(0)), j: 1"}, "known[0]"
    tasks = [
        Task(start_rows, name="start", notifies=[count_event]),
        Task(start_rows, waits=[count_event], notifies=["ready[i, j]"], **grid),
        Task(
            write_one,
            (),
            ["y[i, tile(j, 1)]"],
            waits=[count_event, "ready[i, j]"],
            **grid,
        ),
    ]
    plan = schedule_dynamic(calls(1, tasks=tasks, parts=parts))
    arrays = {"count": np.array([2], np.int32), "y": np.zeros((3, 1), np.float32)}
    assert simulate(plan, [arrays], {}).outputs[0]["y"].tolist() == [[1], [1], [0]]


def test_expected_counts_may_come_from_a_runtime_tensor():
    plan = schedule_static(doubled_ring(2, num_expected=None))
    inputs = [ring_inputs(rank, 8) for rank in range(2)]
    run = simulate(plan, inputs, {"rows": 8})
    assert run.outputs[1]["y"].tolist() == [0, 2, 4, 6, 8, 10, 12, 14]


def test_inputs_that_do_not_fit_are_refused_together(rng):
    c = case("matmul_reduce_scatter", 2, rng)
    c.inputs[1]["w"] = c.inputs[1]["w"][1:]
    del c.inputs[1]["x"]
    with pytest.raises(ArgumentError) as caught:
        simulate(c.plan, c.inputs, c.dims)
    assert "rank 1" in caught.value.where
    assert caught.value.got == "no x; w [31, 32] float32"


def test_dims_that_do_not_fit_are_refused(rng):
    c = case("matmul_reduce_scatter", 2, rng)
    with pytest.raises(ArgumentError, match="rows, n, k"):
        simulate(c.plan, c.inputs, {"rows": 32, "n": 32})


def test_inputs_of_too_few_ranks_are_refused():
    with pytest.raises(ArgumentError, match="inputs of 4 ranks"):
        simulate(plan_of("all_gather_matmul", 4), [], {"rows": 1, "n": 1, "k": 1})


def test_a_body_gets_the_values_of_its_call():
    @device_function(source="", reads=0, writes=1)
    def write(y, *, size, n):
        y[...] = 10 * size + n

    m = Symbol("m", "dim")
    tasks = [
        Task(write, [], ["y n int32"], {"size": m}),
        Task(write, [], ["z n int32"], {"size": 7, "n": m}, name="again"),
    ]
    plan = schedule_static(calls(1, tasks=tasks, dims="n m"))
    [out] = simulate(plan, [{}], {"n": 2, "m": 3}).outputs
    assert out["y"].tolist() == [32, 32] and out["z"].tolist() == [73, 73]


def test_a_body_gets_a_named_constant():
    @device_function(source="", reads=1, writes=1)
    def add(x, y, *, blocks):
        y[...] = x + blocks

    blocks = {"parts": "let blocks = 2", "grid": "i: blocks"}
    operands = ["x 4[tile(i, 2)] float32"], ["y 4[tile(i, 2)] float32"]
    graph = one_call(1, add, *operands, **blocks)
    inputs = [{"x": np.zeros(4, np.float32)}]
    run = simulate(schedule_static(graph), inputs, {})
    assert run.outputs[0]["y"].tolist() == [2] * 4
