"""The order of units in loops: turn by turn, in each turn call by call."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etc_dist.ir import GraphFunction
from etc_dist.schedule import Lane, Plan, schedule_static
from etc_dist.schedule.plan import WORKERS
from tests.graphs.kit import Kit, made


def steps(g: Kit) -> None:
    """Calls before, in and after two loops, one in the other."""
    n, m = g.dims("n m")
    g.do("first", 2)
    with g.loop(step=n):
        g.do("enter", 3, order=lambda t: (2 - t,))
        with g.loop(layer=m):
            g.do("inner", g.grid(i=1, j=2))
            g.do("after")
        g.do("leave")
    g.do("last")


def dependent(graph: GraphFunction) -> Lane:
    """The tensor lane, as if the turns of `steps` waited for earlier ones."""
    lane = schedule_static(graph).lane("tensor")
    return replace(lane, dependent_loops=("step", "layer"))


def units(graph: GraphFunction, workers: int, **dims: int) -> list[str]:
    """The task of each unit of the tensor lane, as text; "" for a unit of no call."""
    env = graph.environment(dims, 0) | {WORKERS.name: workers}
    lane = dependent(graph)

    def text(index: int) -> str:
        unit = lane.find(index, env)
        if unit is None:
            return ""
        call, t = unit
        return call.label([int(v) for v in call.coordinates(t, env).values()])

    return [text(index) for index in range(int(lane.total.evaluate(env)))]


def test_a_lane_takes_a_turn_after_the_other():
    texts = units(made(steps), 1, n=2, m=2)
    turn = [f"enter[step=@, {i}]" for i in (2, 1, 0)]
    for layer in range(2):
        turn += [f"inner[step=@, layer={layer}, 0, {j}]" for j in range(2)]
        turn += [f"after[step=@, layer={layer}, 0]"]
    turn += ["leave[step=@, 0]"]
    turns = [text.replace("@", str(step)) for step in range(2) for text in turn]
    assert texts == ["first[0]", "first[1]", *turns, "last[0]"]


@pytest.mark.parametrize("workers", [2, 3])
def test_a_worker_has_the_same_tasks_in_every_turn(workers):
    workers_of = defaultdict(set)
    for text_idx, text in enumerate(units(made(steps), workers, n=3, m=2)):
        workers_of[re.sub(r"(step|layer)=\d", r"\1", text)].add(text_idx % workers)
    del workers_of[""]
    assert {len(numbers) for numbers in workers_of.values()} == {1}


def test_turns_depend_if_an_event_of_one_is_waited_for_in_the_next():
    def chained(g: Kit) -> None:
        n = g.dims("n")
        turn_events, middle_events = g.event("turns", n + 1), g.event("middles", n)
        with g.loop(step=n) as step:
            with g.loop(layer=1):
                g.do("first", waits=[turn_events[step]], notifies=[middle_events[step]])
            g.do(
                "second",
                waits=[middle_events[step]],
                notifies=[turn_events[step + 1]],
            )

    lanes = [schedule_static(made(g)).lane("tensor") for g in (chained, steps)]
    assert [lane.dependent_loops for lane in lanes] == [("step",), ()]


def test_a_turn_of_fewer_tasks_than_workers_is_followed_at_once():
    assert "" not in units(made(steps), 100, n=3, m=2)


@given(n=st.integers(0, 3), m=st.integers(0, 3), workers=st.integers(1, 5))
def test_position_is_the_inverse_of_find(n, m, workers):
    graph = made(steps)
    env = graph.environment({"n": n, "m": m}, 0) | {WORKERS.name: workers}
    lane, positions = dependent(graph), []
    for call in lane.calls:
        unit = np.arange(int(call.tasks.evaluate(env)))
        at = lane.position(call, unit, env)
        for number, place in zip(unit.tolist(), np.asarray(at).tolist(), strict=True):
            assert lane.find(place, env) == (call, number)
        positions += np.asarray(at).tolist()
    numbers = range(int(lane.total.evaluate(env)) + 1)
    assert {n for n in numbers if lane.find(n, env) is not None} == set(positions)
    if workers == 1:
        assert len(set(positions)) == numbers[-1]


def test_a_plan_shows_its_loops():
    plan: Plan = schedule_static(graph := made(steps))
    _, transfer_lane = plan.lanes
    plan = replace(plan, lanes=(dependent(graph), transfer_lane))
    lines = plan.show(2, n=2, m=5).splitlines()
    assert lines[2:9] == [
        "  first: 2 units",
        "    = 2",
        "  loop step: n turns of 3 + m * 3 + 1 units",
        "    enter: 3 units",
        "      = 3",
        "    loop layer: m turns of 3 units",
        "      inner: 2 units",
    ]
    assert lines[-2] == "  51 units = 25.50 waves of 2, 10 of no call"
