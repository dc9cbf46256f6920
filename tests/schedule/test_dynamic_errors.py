"""Refusals of dynamic scheduling, and planted faults in dynamic plans."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest

from etc_dist.errors import DeadlockError, GraphError, RaceError, ScheduleError
from etc_dist.ir import (
    DeviceFunction,
    Graph,
    GraphFunction,
    device_function,
    graph_function,
    up_to,
)
from etc_dist.schedule import schedule_dynamic, schedule_static
from etc_dist.schedule.plan import Plan
from etc_dist.verify.verify import verify


@device_function(source="touch.cuh", reads=0, writes=0)
def touch() -> None:
    pass


@device_function(source="fill.cuh", reads=0, writes=1)
def fill(y: Any) -> None:
    y[...] = 1


@device_function(source="copy.cuh", reads=1, writes=1, lane="transfer")
def copy(x: Any, y: Any) -> None:
    y[...] = x


def build(body: Callable[[Graph], None], world_size: int = 1) -> GraphFunction:
    return graph_function(body)(world_size)


def refused(plan: Plan, workers: int = 4, **dims: int) -> GraphError:
    with pytest.raises(GraphError) as caught:
        verify(plan, dims, workers)
    return caught.value


# ------------------------------------------------------------------- planted faults


@graph_function
def chain(g: Graph, *, expects: int = 2, notifies: bool = True) -> None:
    """Rank r's task i of `second` waits for both ranks' tasks i of `first`."""
    done = g.events("done", (3,), expects=expects, cross_rank=True)
    d, i = grid = g.grid(d=2, i=3)
    notified = [done.on(d)[i]] if notifies else []
    g.call(touch, grid, name="first", notifies=notified)
    i, _j = grid = g.grid(i=3, j=5)
    g.call(touch, grid, name="second", waits=[done[i]])


def test_a_missing_notify_is_found():
    plan = schedule_dynamic(chain(2, notifies=False))
    error = refused(plan)
    assert isinstance(error, DeadlockError)
    assert "expects 2 notifications and all tasks together make 0" in error.got


def test_a_count_that_is_too_high_is_a_deadlock():
    plan = schedule_dynamic(chain(2, expects=3))
    assert isinstance(refused(plan), DeadlockError)


def test_a_count_that_is_too_low_is_found():
    plan = schedule_dynamic(chain(2, expects=1))
    assert "expects 1 notifications and gets 2" in refused(plan).got


def test_a_cycle_of_waits_is_found_with_its_steps():
    def body(g: Graph) -> None:
        there = g.events("there", (2,), expects=1, cross_rank=True)
        back = g.events("back", (2,), expects=1)
        (i,) = one = g.grid(i=2)
        peer = (g.rank + 1) % 2
        notifies = [there.on(peer)[i]]
        g.call(touch, one, name="a", waits=[back[i]], notifies=notifies)
        g.call(touch, one, name="b", waits=[there[i]], notifies=[back[i]])

    plan = schedule_dynamic(build(body, 2))
    steps = [
        "a[i=0] on rank 0 waits for back[0] on rank 0, which b[i=0] on rank 0",
        "b[i=0] on rank 0 waits for there[0] on rank 0, which a[i=0] on rank 1",
        "a[i=0] on rank 1 waits for back[0] on rank 1, which b[i=0] on rank 1",
        "b[i=0] on rank 1 waits for there[0] on rank 1, which a[i=0] on rank 0",
    ]
    error = refused(plan)
    assert "8 tasks can never run" in error.got
    lines = [line.strip() for line in error.got.splitlines()[-4:]]
    assert lines == [f"{step} notifies" for step in steps]


@graph_function
def by_worker(g: Graph) -> None:
    """Task i of `use` reads what task i of `make` wrote: ordered by units alone."""
    x = g.local("x", (4,), "float32")
    y = g.output("y", (4,), "float32")
    (i,) = grid = g.grid(i=4)
    g.call(fill, grid, name="make", writes=[x[i]])
    use = DeviceFunction("use", copy.body, "copy.cuh", "tensor", 1, 1)
    g.call(use, grid, name="use", reads=[x[i]], writes=[y[i]])


def test_the_order_of_units_does_not_prevent_a_race():
    graph = by_worker(1)
    verify(schedule_static(graph), {}, workers=4)
    error = refused(schedule_dynamic(graph))
    assert isinstance(error, RaceError)
    assert "make[i=0] on rank 0 writes and use[i=0] on rank 0 reads x[0:1]" in error.got


def test_a_plan_whose_groups_are_torn_apart_is_refused():
    plan = schedule_dynamic(chain(2))
    lane = plan.lanes[0]
    second = replace(lane.calls[1], order=plan.graph.calls[1].order[::-1])
    calls = (lane.calls[0], second)
    lanes = (replace(lane, calls=calls), plan.lanes[1])
    torn = replace(plan, graph=replace(plan.graph, calls=calls), lanes=lanes)
    assert (
        "call second: tasks that wait for the same events are not" in refused(torn).got
    )


def test_an_element_out_of_range_names_its_task():
    def body(g: Graph) -> None:
        done = g.events("done", (2,), expects=1)
        (i,) = grid = g.grid(i=3)
        (k,) = begin = g.grid(k=2)
        g.call(touch, begin, name="begin", notifies=[done[k]])
        g.call(touch, grid, name="follow", waits=[done[i]])

    plan = schedule_dynamic(build(body))
    assert "follow[i=2] on rank 0 waits for done[2]" in refused(plan).got


# ------------------------------------------------------------------------ refusals


def reason(body: Callable[[Graph], None], world_size: int = 2) -> str:
    with pytest.raises(ScheduleError) as caught:
        schedule_dynamic(build(body, world_size))
    assert caught.value.fix.endswith('use schedule="static"')
    return caught.value.got


def test_a_graph_without_calls_is_refused():
    with pytest.raises(ScheduleError, match="has nothing to run"):
        schedule_dynamic(build(lambda g: None))


def test_a_wait_for_a_loaded_element_is_refused():
    def body(g: Graph) -> None:
        to = g.input("to", (4,), "int32")
        done = g.events("done", (4,), expects=1)
        (i,) = grid = g.grid(i=4)
        g.call(touch, grid, waits=[done[to.load(i)]])

    assert reason(body) == "call touch waits for done[to[i]], an element that is loaded"


def test_a_loaded_count_of_peers_is_refused():
    def body(g: Graph) -> None:
        counts = g.input("counts", (4,), "int32")
        done = g.events("done", (4,), expects=counts.load, cross_rank=True)
        (i,) = grid = g.grid(i=4)
        g.call(touch, grid, waits=[done[i]])

    assert reason(body) == "done is cross-rank, its expected count is loaded"


def test_a_wait_for_peers_and_for_a_loaded_count_is_refused():
    def body(g: Graph) -> None:
        counts = g.input("counts", (4,), "int32")
        here = g.events("here", (4,), expects=1, cross_rank=True)
        done = g.events("done", (4,), expects=counts.load)
        (i,) = grid = g.grid(i=4)
        g.call(touch, grid, waits=[here[i], done[i]])

    assert "call touch waits for peers and for done[i], a loaded count" in reason(body)


@graph_function
def waiting(g: Graph, *, first: bool = True) -> None:
    """Two calls that wait, of which the second one is not queued."""
    events = [g.events(name, (4,), expects=1) for name in ("begun", "done")]
    (i,) = grid = g.grid(i=4)
    made = [name[i] for name in events]
    g.call(touch, grid, name="begin", notifies=[made[0]])
    waits = {"waits": [made[0]], "notifies": [made[1]], "queued": first}
    g.call(touch, grid, name="first", **waits)
    g.call(touch, grid, name="second", waits=[made[1]], queued=False)


def test_an_unqueued_call_after_a_queued_one_is_refused():
    expected = (
        "call second has queued=False, and waits for done[i], which the queued call "
    )
    expected += "first notifies"
    with pytest.raises(ScheduleError) as caught:
        schedule_dynamic(waiting(1))
    assert caught.value.got == expected
    plan = schedule_dynamic(waiting(1, first=False))
    queued = replace(plan.graph.calls[1], queued=True)
    calls = (plan.graph.calls[0], queued, plan.graph.calls[2])
    lanes = (replace(plan.lanes[0], calls=calls), plan.lanes[1])
    torn = replace(plan, graph=replace(plan.graph, calls=calls), lanes=lanes)
    assert expected in refused(torn).got


def test_an_unqueued_call_with_a_loaded_extent_is_refused():
    def body(g: Graph) -> None:
        counts = g.input("counts", (1,), "int32")
        done = g.events("done", (1,), expects=1)
        grid = g.grid(i=up_to(4, counts.load(0)))
        g.call(touch, grid, waits=[done[0]], queued=False)

    with pytest.raises(ScheduleError) as caught:
        schedule_dynamic(build(body))
    assert caught.value.got == "call touch has queued=False, and its extent is loaded"
    assert caught.value.fix == 'omit queued=False, or use schedule="static"'


def test_tasks_in_an_order_that_deadlocks_are_found():
    def body(g: Graph, queued: bool) -> None:
        done = g.events("done", (9,), expects=1)
        g.call(touch, g.grid(one=1), name="begin", notifies=[done[8]])
        (i,) = grid = g.grid(i=8)
        events = {"waits": [done[i + 1]], "notifies": [done[i]]}
        g.call(touch, grid, name="back", queued=queued, **events)
        g.call(touch, g.grid(two=1), name="end", waits=[done[0]])

    verify(schedule_dynamic(build(lambda g: body(g, True))), {}, workers=4)
    error = refused(schedule_dynamic(build(lambda g: body(g, False))))
    assert isinstance(error, DeadlockError)
    assert "back[i=0] on rank 0 waits for done[1] on rank 0" in error.got


def test_a_grid_that_depends_on_the_rank_is_refused():
    def body(g: Graph) -> None:
        own = g.let("own", g.rank + 1)
        done = g.events("done", (1,), expects=1)
        g.call(touch, g.grid(i=2 * own), waits=[done[0]])

    assert reason(body) == "the grid of call touch, which waits, depends on the rank"


def test_too_many_waits_are_refused():
    def body(g: Graph) -> None:
        done = g.events("done", (33,), expects=1)
        g.call(touch, g.grid(i=1), waits=[done[k] for k in range(33)])

    assert reason(body) == "call touch has 33 waits, more than 32"


def test_all_reasons_are_listed():
    def body(g: Graph) -> None:
        counts = g.input("counts", (4,), "int32")
        done = g.events("done", (4,), expects=counts.load, cross_rank=True)
        (i,) = grid = g.grid(i=4 + g.rank)
        g.call(touch, grid, waits=[done[counts.load(i)]])

    assert len(reason(body).split("; ")) == 3


@pytest.mark.parametrize("waits", [False, True])
def test_a_count_without_a_common_first_wait_is_refused(waits):
    def body(g: Graph) -> None:
        counts = g.input("counts", (1,), "int32")
        done = g.events("done", (4,), expects=1)
        (i,) = grid = g.grid(i=up_to(4, counts.load(0)))
        g.call(touch, grid, waits=[done[i]] if waits else [])

    assert reason(body) == (
        "call touch has a loaded extent, and its tasks have no first wait in common"
    )


@pytest.mark.parametrize("in_loop", [False, True])
def test_unqueued_calls_are_offered_where_they_help(in_loop):
    def body(g: Graph, queued: bool = True) -> None:
        counts = g.input("counts", (4,), "int32")
        done = g.events("done", (4,), expects=counts.load, cross_rank=True)
        (d,) = grid = g.grid(d=2)
        g.call(touch, grid, name="first", notifies=[done.on(d)[0]])
        with g.loop(turn=2) if in_loop else nullcontext():
            g.call(touch, g.grid(k=1), waits=[done[0]], queued=queued)

    with pytest.raises(ScheduleError) as caught:
        schedule_dynamic(build(body, 2))
    offer = "pass queued=False to each call that waits, or " * (not in_loop)
    assert caught.value.fix == f'{offer}use schedule="static"'
    if not in_loop:
        schedule_dynamic(build(lambda g: body(g, queued=False), 2))


def test_a_peer_cannot_load_the_condition_of_an_only_wait():
    def body(g: Graph, waits: int = 1) -> None:
        counts = g.input("counts", (4,), "int32")
        begun = g.events("begun", (1,), expects=1)
        done = g.events("done", (4,), expects=1, cross_rank=True)
        g.call(touch, g.grid(b=1), name="begin", notifies=[begun[0]])
        (i,) = grid = g.grid(i=4)
        wait = done[i].when(counts.load(i))
        g.call(touch, grid, waits=[wait, begun[0]][:waits])

    assert reason(body) == (
        "call touch waits for done[i] when counts[i] alone, by a loaded condition"
    )
    schedule_dynamic(build(lambda g: body(g, waits=2)))


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("zero", "known, after which it is known, may expect 0 or peers"),
        ("loop", "a loaded extent, and no wait names all its loops"),
        ("inner", "a loaded extent of r, which no wait names, after other axes"),
    ],
)
def test_surplus_tasks_that_no_notifier_can_tell_are_refused(kind, reason):
    def body(g: Graph) -> None:
        count = g.input("count", (1,), "int32").load(0)
        known = g.events("known", (2,), expects=g.dims("n") if kind == "zero" else 1)
        (i,) = grid = g.grid(i=2)
        g.call(touch, grid, name="know", notifies=[known[i]])
        with g.loop(turn=2) as turn:
            outer = {"a": 2} if kind == "inner" else {}
            grid = g.grid(**outer, r=up_to(4, count))
            g.call(touch, grid, waits=[known[0 if kind == "loop" else turn]])

    with pytest.raises(ScheduleError) as caught:
        schedule_dynamic(build(body))
    assert reason in caught.value.got
