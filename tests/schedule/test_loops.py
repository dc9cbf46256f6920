"""The order of units in loops: turn by turn, in each turn call by call."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etc_dist.ir import DeviceFunction, Graph, GraphFunction, graph_function
from etc_dist.schedule import Plan, schedule_static

TENSOR = DeviceFunction("f", print, "f.cuh", "tensor", 0, 0)
PAIR = DeviceFunction("pair", print, "f.cuh", "tensor", 0, 0, cluster=2)


@graph_function
def steps(g: Graph, *, pair: bool) -> None:
    """Calls before, in and after two loops, one in the other."""
    n, m = g.dims("n m")
    g.call(TENSOR, g.grid(i=2), name="first")
    with g.loop(step=n):
        g.call(TENSOR, g.grid(i=3), name="enter", order=lambda t: (2 - t,))
        with g.loop(layer=m):
            g.call(PAIR if pair else TENSOR, g.grid(i=1, j=2), name="inner")
            g.call(TENSOR, g.grid(i=1), name="after")
        g.call(TENSOR, g.grid(i=1), name="leave")
    g.call(TENSOR, g.grid(i=1), name="last")


def units(graph: GraphFunction, **dims: int) -> list[list[str]]:
    """The tasks of each unit of the tensor lane, as text."""
    plan, env = schedule_static(graph), graph.environment(dims, 0)
    lane = plan.lane("tensor")

    def text(index: int) -> list[str]:
        found = list(plan.unit(lane, index, env))
        at = [(call, call.coordinates(t, env).values()) for call, t in found]
        return [call.label([int(v) for v in values]) for call, values in at]

    return [text(index) for index in range(int(lane.total.evaluate(env)))]


def test_a_lane_takes_a_turn_after_the_other():
    found = [task for unit in units(steps(1, pair=False), n=2, m=2) for task in unit]
    turn = [f"enter[step=@, {i}]" for i in (2, 1, 0)]
    for layer in range(2):
        turn += [f"inner[step=@, layer={layer}, 0, {j}]" for j in range(2)]
        turn += [f"after[step=@, layer={layer}, 0]"]
    turn += ["leave[step=@, 0]"]
    turns = [text.replace("@", str(step)) for step in range(2) for text in turn]
    assert found == ["first[0]", "first[1]", *turns, "last[0]"]


def test_a_unit_does_not_span_two_turns():
    found = units(steps(1, pair=True), n=1, m=2)
    enter = [["enter[step=0, 2]", "enter[step=0, 1]"], ["enter[step=0, 0]"]]
    assert found[:3] == [["first[0]", "first[1]"], *enter]
    assert [unit for unit in found if "after" in unit[0]] == [
        [f"after[step=0, layer={layer}, 0]"] for layer in range(2)
    ]


@pytest.mark.parametrize("pair", [False, True])
@given(n=st.integers(0, 3), m=st.integers(0, 3))
def test_position_is_the_inverse_of_find(pair, n, m):
    graph = steps(1, pair=pair)
    plan, env = schedule_static(graph), graph.environment({"n": n, "m": m}, 0)
    lane, seen = plan.lane("tensor"), []
    for call in lane.calls:
        count = np.arange(int(call.tasks.evaluate(env)))
        unit, _ = lane.place(call, count, env)
        at = lane.position(call, unit, env)
        for number, place in zip(unit.tolist(), np.asarray(at).tolist(), strict=True):
            assert lane.find(place, env) == (call, number)
        seen += np.asarray(at).tolist()
    assert set(seen) == set(range(int(lane.total.evaluate(env))))
    assert lane.find(len(set(seen)), env) is None


def test_a_plan_shows_its_loops():
    plan: Plan = schedule_static(steps(1, pair=False))
    assert plan.show(2, n=2, m=5).splitlines()[2:9] == [
        "  first: 2 units",
        "    = 2",
        "  loop step: n turns of 3 + m * 3 + 1 units",
        "    enter: 3 units",
        "      = 3",
        "    loop layer: m turns of 3 units",
        "      inner: 2 units",
    ]
