"""Graphs with loaded dependencies: every routing gives NumPy's result."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import etc_dist
from etc_dist.ir import GraphFunction, device_function
from etc_dist.runtime.cpu import simulate
from etc_dist.schedule import schedule_dynamic, schedule_static
from tests.emulate.cases import set_some, some_numbers
from tests.graphs.calls import Task, calls
from tests.graphs.permute import EXPERTS, inputs, permute, reference
from tests.ops.arrays import Arrays
from tests.runtime.programs import send

SCHEDULES = {"static": schedule_static, "dynamic": schedule_dynamic}
ROUTINGS = {
    "an empty expert": [0, 3, 1, 0, 3, 3, 1, 1],
    "all to one": [2] * 8,
    "in turn": [0, 1, 2, 3] * 2,
    "backwards": [3, 3, 2, 2, 1, 1, 0, 0],
}


def simulated(routings: list[list[int]], seed: int, schedule: str) -> list[object]:
    plan = SCHEDULES[schedule](permute(len(routings)))
    given_inputs = [inputs(routing) for routing in routings]
    dims = {"n": len(routings[0])}
    run = simulate(plan, given_inputs, dims, seed=seed, workers=2, epochs=2)
    return [outputs["y"].tolist() for outputs in run.outputs]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("routing", [*ROUTINGS.values(), []], ids=[*ROUTINGS, "none"])
def test_rows_come_sorted_by_expert(routing, schedule, seed):
    assert simulated([routing], seed, schedule) == [reference(routing)]


@st.composite
def two_routings(draw: st.DrawFn) -> list[list[int]]:
    n = draw(st.integers(0, 9))
    routing = st.lists(st.integers(0, EXPERTS - 1), min_size=n, max_size=n)
    return [draw(routing), draw(routing)]


@pytest.mark.parametrize("schedule", SCHEDULES)
@given(two_routings(), st.integers(0, 2**32))
def test_any_routing_in_any_order_gives_the_reference(schedule, routings, seed):
    expected = [reference(routing) for routing in routings]
    assert simulated(routings, seed, schedule) == expected


@pytest.mark.mpi
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_program_serves_all_routings(schedule, world):
    arrays = Arrays(world.backend)
    program = etc_dist.compile(permute(world.size), world, schedule=schedule)
    for routing in ROUTINGS.values():
        routing = np.roll(routing, world.rank).tolist()
        given_inputs = {k: arrays.put(v) for k, v in inputs(routing).items()}
        y = program.run(**given_inputs)["y"]
        program.synchronize()
        assert arrays.get(y).tolist() == reference(routing)
    program.close()


# ------------------------------------------------------- what runs when, and what not


@device_function(source="", reads=0, writes=1)
def must_not_run(y):
    raise AssertionError("nothing is left to write")


@device_function(source="", reads=0, writes=0)
def look():
    LOOKED.append(None)


LOOKED: list[None] = []


def nothing_left(part: str) -> GraphFunction:
    """Tasks that write nothing notify tasks that never write."""
    parts = """
        input size_of [2] int32
        events done [1] expects 2
    """
    tasks = [
        Task(must_not_run, (), [f"x 4[{part}] float32"], grid="i: 2",
             notifies=["done[0]"]),
        Task(look, grid="k: 3", waits=["done[0]"]),
    ]  # fmt: skip
    return calls(1, tasks=tasks, parts=parts, kinds={"x": "local"})


@pytest.mark.parametrize("part", ["span(0, size_of.load(i))", "span(4, 1)"])
def test_a_task_without_anything_to_write_only_notifies(part, seed):
    LOOKED.clear()
    given_inputs = [{"size_of": np.array([0, -3], np.int32)}]
    simulate(schedule_static(nothing_left(part)), given_inputs, {}, seed=seed)
    assert len(LOOKED) == 3


@pytest.mark.mpi
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("lane", ["tensor", "transfer"])
def test_a_body_does_not_run_for_an_empty_task(
    lane, schedule, unverified, make_program
):
    # Parts of y stay unwritten, which a check of the run would refuse.
    program = make_program(set_some(unverified.size, lane=lane), schedule=schedule)
    arrays = Arrays(unverified.backend)
    numbers, expected = some_numbers()
    put = {name: arrays.put(array) for name, array in numbers.items()}
    program.run(**put)
    program.synchronize()
    np.testing.assert_array_equal(arrays.get(put["y"]), expected)


@device_function(source="", reads=0, writes=1)
def clear(y):
    y[...] = 0


def deal() -> GraphFunction:
    """Each row goes to the rank and the slot that are given with it; what is left of y
    is zero."""
    parts = """
        input owner [3, 2] int32
        input arrivals [1] int32
        output y [6, 4] float32
        symmetric box [6, 4] float32
        cross-rank events here [1] expects arrivals.load(0)
    """
    to, count = "on(owner.load(i, 0))", "arrivals.load(0)"
    tasks = [
        Task(
            send,
            ["x 3[i] 4 float32"],
            [f"box.{to}[owner.load(i, 1), :]"],
            grid="i: 3",
            notifies=[f"here.{to}[0]"],
        ),
        Task(
            send,
            [f"box[span(0, {count}), :]"],
            [f"y[span(0, {count}), :]"],
            name="take",
            waits=["here[0]"],
        ),
        Task(clear, (), [f"y[span({count}, 6), :]"]),
    ]
    return calls(2, tasks=tasks, parts=parts)


def deal_inputs(places: list[int]) -> list[dict[str, np.ndarray]]:
    """By rank: row r of all goes to place r, six to a rank."""
    owner = np.array([divmod(place, 6) for place in places], np.int32)
    return [
        {
            "x": np.full((3, 4), 1, np.float32) + np.arange(3, dtype="f4")[:, None] + k,
            "owner": owner[k : k + 3],
            "arrivals": np.array([np.sum(owner[:, 0] == k // 3)], np.int32),
        }
        for k in (0, 3)
    ]


@pytest.mark.parametrize(
    "places", [[0, 1, 2, 6, 7, 8], [7, 1, 6, 8, 0, 9], [5, 4, 3, 2, 1, 0]]
)
def test_data_decides_which_rank_is_written_to(places, seed):
    run = simulate(schedule_static(deal()), deal_inputs(places), {}, seed=seed)
    expected = np.zeros(12, np.float32)
    expected[places] = np.arange(1, 7)
    column = np.concatenate([outputs["y"][:, 0] for outputs in run.outputs])
    assert column.tolist() == expected.tolist()
