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
from etc_dist.schedule.dynamic import plan_dynamic
from etc_dist.schedule.plan import Plan
from etc_dist.verify.verify import verify
from tests.refusals import refused


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


def fault(plan: Plan, words: str, kind: type[GraphError] = GraphError) -> GraphError:
    return refused(lambda: verify(plan, {}, 4), words, kind)


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


FAULTS = {
    "no notification": (
        {"notifies": False},
        "expects 2 notifications and all tasks together make 0",
        DeadlockError,
    ),
    "high count": ({"expects": 3}, "", DeadlockError),
    "low count": ({"expects": 1}, "expects 1 notifications and gets 2", GraphError),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_wrong_count_is_found(name):
    options, words, kind = FAULTS[name]
    plan = schedule_dynamic(chain(2, **options))
    fault(plan, words, kind)


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
    error = fault(plan, "8 tasks can never run")
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
    words = "make[i=0] on rank 0 writes and use[i=0] on rank 0 reads x[0:1]"
    fault(schedule_dynamic(graph), words, RaceError)


def test_a_plan_whose_groups_are_torn_apart_is_refused():
    plan = schedule_dynamic(chain(2))
    lane = plan.lanes[0]
    second = replace(lane.calls[1], order=plan.graph.calls[1].order[::-1])
    calls = (lane.calls[0], second)
    lanes = (replace(lane, calls=calls), plan.lanes[1])
    torn = replace(plan, graph=replace(plan.graph, calls=calls), lanes=lanes)
    fault(torn, "call second: tasks that wait for the same events are not")


def test_an_element_out_of_range_names_its_task():
    def body(g: Graph) -> None:
        done = g.events("done", (2,), expects=1)
        (i,) = grid = g.grid(i=3)
        (k,) = begin = g.grid(k=2)
        g.call(touch, begin, name="begin", notifies=[done[k]])
        g.call(touch, grid, name="follow", waits=[done[i]])

    fault(schedule_dynamic(build(body)), "follow[i=2] on rank 0 waits for done[2]")


# ------------------------------------------------------------------------ refusals


STATIC = '|use schedule="static"'


def waits(
    of: Callable[..., list[Any]],
    *,
    extent: Callable[..., Any] = lambda g, counts: 4,
    peers: bool = False,
    is_counted: bool = False,
    **call: Any,
) -> Callable[[Graph], None]:
    """A call of `touch` that waits for of(done, counts, i, here, begun)."""

    def body(g: Graph) -> None:
        counts = g.input("counts", (4,), "int32")
        expects = counts.load if is_counted else 1
        done = g.events("done", (4,), expects=expects, cross_rank=peers)
        here = g.events("here", (4,), expects=1, cross_rank=True)
        begun = g.events("begun", (1,), expects=1)
        (i,) = grid = g.grid(i=extent(g, counts))
        g.call(touch, grid, waits=of(done, counts, i, here, begun), **call)

    return body


def loaded(g: Graph, counts: Any) -> Any:
    return up_to(4, counts.load(0))


NO_COMMON = (
    "got: call touch has a loaded extent, and its tasks have no first wait in common "
)
REFUSALS = {
    "no calls": (lambda g: None, "has nothing to run"),
    "loaded element": (
        waits(lambda done, counts, i, *_: [done[counts.load(i)]]),
        "got: call touch waits for done[counts[i]], an element that is loaded to do",
    ),
    "loaded count of peers": (
        waits(lambda done, counts, i, *_: [done[i]], peers=True, is_counted=True),
        "got: done is cross-rank, its expected count is loaded to do",
    ),
    "peers and a loaded count": (
        waits(lambda done, counts, i, here, _: [here[i], done[i]], is_counted=True),
        "call touch waits for peers and for done[i], a loaded count",
    ),
    "grid of the rank": (
        waits(
            lambda done, *_: [done[0]],
            extent=lambda g, counts: 2 * g.let("own", g.rank + 1),
        ),
        "got: the grid of call touch, which waits, depends on the rank to do",
    ),
    "many waits": (
        waits(lambda done, *_: [done[k % 4] for k in range(33)]),
        "got: call touch has 33 waits, more than 32 to do",
    ),
    "loaded extent without waits": (waits(lambda *_: [], extent=loaded), NO_COMMON),
    "loaded extent and done[i]": (
        waits(lambda done, counts, i, *_: [done[i]], extent=loaded),
        NO_COMMON,
    ),
    "loaded condition of the only wait": (
        waits(lambda done, counts, i, *_: [done[i].when(counts.load(i))], peers=True),
        "got: call touch waits for done[i] when counts[i] alone, by a loaded condition",
    ),
    "three reasons": (
        waits(
            lambda done, counts, i, *_: [done[counts.load(i)]],
            extent=lambda g, counts: 4 + g.rank,
            peers=True,
            is_counted=True,
        ),
        "an element that is loaded|expected count is loaded|depends on the rank",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_graph_that_no_queue_serves_is_refused(name):
    body, words = REFUSALS[name]
    words += "" if name == "no calls" else STATIC
    refused(lambda: schedule_dynamic(build(body, 2)), words, ScheduleError)


def test_a_peer_may_load_the_condition_of_a_second_wait():
    def of(done: Any, counts: Any, i: Any, here: Any, begun: Any) -> list[Any]:
        return [done[i].when(counts.load(i)), begun[0]]

    schedule_dynamic(build(waits(of, peers=True), 2))


@graph_function
def waiting(g: Graph) -> None:
    """Two calls that wait, one after the other."""
    events = [g.events(name, (4,), expects=1) for name in ("begun", "done")]
    (i,) = grid = g.grid(i=4)
    made = [name[i] for name in events]
    g.call(touch, grid, name="begin", notifies=[made[0]])
    g.call(touch, grid, name="first", waits=[made[0]], notifies=[made[1]])
    g.call(touch, grid, name="second", waits=[made[1]])


def test_a_call_that_is_claimed_before_a_queued_one_is_refused():
    expected = (
        "call second is claimed first, and waits for done[i], which the queued call "
        "first notifies"
    )
    words = f"got: {expected} to"
    refused(lambda: plan_dynamic(waiting(1), ["second"]), words, ScheduleError)
    plan = plan_dynamic(waiting(1), ["first", "second"])
    verify(plan, {}, workers=4)
    lanes = (replace(plan.lanes[0], claimed=("second",)), plan.lanes[1])
    fault(replace(plan, lanes=lanes), expected)


@pytest.mark.parametrize("in_loop", [False, True])
def test_calls_in_loops_and_of_loaded_extents_are_not_claimed_first(in_loop):
    def body(g: Graph) -> None:
        count = g.input("count", (1,), "int32").load(0)
        done = g.events("done", (1,), expects=1)
        with g.loop(turn=2) if in_loop else nullcontext():
            grid = g.grid(i=4 if in_loop else up_to(4, count))
            g.call(touch, grid, waits=[done[0]])

    words = "got: call touch is claimed first, in a loop or a loaded extent to"
    refused(lambda: plan_dynamic(build(body), ["touch"]), words, ScheduleError)


def test_tasks_in_an_order_that_deadlocks_are_found():
    def body(g: Graph) -> None:
        done = g.events("done", (9,), expects=1)
        g.call(touch, g.grid(one=1), name="begin", notifies=[done[8]])
        (i,) = grid = g.grid(i=8)
        events = {"waits": [done[i + 1]], "notifies": [done[i]]}
        g.call(touch, grid, name="back", **events)
        g.call(touch, g.grid(two=1), name="end", waits=[done[0]])

    verify(schedule_dynamic(build(body)), {}, workers=4)
    plan = plan_dynamic(build(body), ["back"])
    fault(plan, "back[i=0] on rank 0 waits for done[1] on rank 0", DeadlockError)


def test_a_count_after_an_event_that_may_expect_nothing_is_refused():
    def body(g: Graph) -> None:
        count = g.input("count", (1,), "int32").load(0)
        known = g.events("known", (1,), expects=g.dims("n"))
        g.call(touch, g.grid(i=2), name="know", notifies=[known[0]])
        g.call(touch, g.grid(r=up_to(4, count)), waits=[known[0]])

    reason = "known, after which it is known, may expect 0 or peers"
    refused(lambda: schedule_dynamic(build(body)), reason, ScheduleError)
