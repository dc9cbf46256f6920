"""Refusals of dynamic scheduling, and planted faults in dynamic plans."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from etc_dist.errors import DeadlockError, GraphError, RaceError, ScheduleError
from etc_dist.ir import up_to
from etc_dist.schedule import schedule_dynamic, schedule_static
from etc_dist.schedule.dynamic import plan_dynamic
from etc_dist.schedule.plan import Plan
from etc_dist.verify.verify import verify
from tests.graphs.kit import ROW, Kit, backwards, cycle, made
from tests.refusals import refused


def fault(plan: Plan, words: str, kind: type[GraphError] = GraphError) -> GraphError:
    return refused(lambda: verify(plan, {}, 4), words, kind)


# ------------------------------------------------------------------- planted faults


def chain(g: Kit, *, expects: int = 2, notifies: bool = True) -> None:
    """Rank r's task i of `second` waits for both ranks' tasks i of `first`."""
    end_event = g.event("done", 3, expects=expects, cross_rank=True)
    d, i = grid = g.grid(d=2, i=3)
    g.do("first", grid, notifies=[end_event.on(d)[i]] if notifies else [])
    i, _j = grid = g.grid(i=3, j=5)
    g.do("second", grid, waits=[end_event[i]])


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
    plan = schedule_dynamic(made(partial(chain, **options), 2))
    fault(plan, words, kind)


def test_a_cycle_of_waits_is_found_with_its_steps():
    steps = [
        "a[i=0] on rank 0 waits for back[0] on rank 0, which b[i=0] on rank 0",
        "b[i=0] on rank 0 waits for there[0] on rank 0, which a[i=0] on rank 1",
        "a[i=0] on rank 1 waits for back[0] on rank 1, which b[i=0] on rank 1",
        "b[i=0] on rank 1 waits for there[0] on rank 1, which a[i=0] on rank 0",
    ]
    error = fault(schedule_dynamic(made(cycle, 2)), "4 tasks can never run")
    lines = [line.strip() for line in error.got.splitlines()[-4:]]
    assert lines == [f"{step} notifies" for step in steps]


def test_the_order_of_units_does_not_prevent_a_race():
    """Task i of `use` reads what task i of `make` wrote: ordered by units alone."""

    def by_worker(g: Kit) -> None:
        g.do("make", 4, writes=[g.x(4)[ROW]])
        g.do("use", 4, reads=[g.x()[ROW]])

    graph = made(by_worker)
    verify(schedule_static(graph), {}, workers=4)
    words = "make[i=0] on rank 0 writes and use[i=0] on rank 0 reads x[0:1]"
    fault(schedule_dynamic(graph), words, RaceError)


def test_a_plan_whose_groups_are_torn_apart_is_refused():
    plan = schedule_dynamic(made(chain, 2))
    lane = plan.lanes[0]
    second = replace(lane.calls[1], order=plan.graph.calls[1].order[::-1])
    calls = (lane.calls[0], second)
    lanes = (replace(lane, calls=calls), plan.lanes[1])
    torn = replace(plan, graph=replace(plan.graph, calls=calls), lanes=lanes)
    fault(torn, "call second: tasks that wait for the same events are not")


def test_an_element_out_of_range_names_its_task():
    def body(g: Kit) -> None:
        end_event = g.event("done", 2)
        g.do("begin", 2, notifies=[end_event[ROW]])
        g.do("follow", 3, waits=[end_event[ROW]])

    fault(schedule_dynamic(made(body)), "follow[i=2] on rank 0 waits for done[2]")


# ------------------------------------------------------------------------ refusals


STATIC = '|use schedule="static"'


def waits(
    of: Callable[..., list[Any]],
    *,
    extent: Callable[..., Any] = lambda g, counts: 4,
    peers: bool = False,
    is_counted: bool = False,
    **call: Any,
) -> Callable[[Kit], None]:
    """A call of `touch` that waits for of(end_event, counts, i, here, begin_event)."""

    def body(g: Kit) -> None:
        counts = g.input("counts", (4,), "int32")
        expects = counts.load if is_counted else 1
        end_event = g.events("done", (4,), expects=expects, cross_rank=peers)
        here = g.events("here", (4,), expects=1, cross_rank=True)
        begin_event = g.events("begun", (1,), expects=1)
        (i,) = grid = g.grid(i=extent(g, counts))
        g.do("touch", grid, waits=of(end_event, counts, i, here, begin_event), **call)

    return body


def loaded(g: Kit, counts: Any) -> Any:
    return up_to(4, counts.load(0))


NO_COMMON = (
    "got: call touch has a loaded extent, and its tasks have no first wait in common "
)
REFUSALS = {
    "no calls": (lambda g: None, "has nothing to run"),
    "loaded element": (
        waits(lambda end_event, counts, i, *_: [end_event[counts.load(i)]]),
        "got: call touch waits for done[counts[i]], an element that is loaded to do",
    ),
    "loaded count of peers": (
        waits(
            lambda end_event, counts, i, *_: [end_event[i]], peers=True, is_counted=True
        ),
        "got: done is cross-rank, its expected count is loaded to do",
    ),
    "peers and a loaded count": (
        waits(
            lambda end_event, counts, i, here, _: [here[i], end_event[i]],
            is_counted=True,
        ),
        "call touch waits for peers and for done[i], a loaded count",
    ),
    "grid of the rank": (
        waits(
            lambda end_event, *_: [end_event[0]],
            extent=lambda g, counts: 2 * g.let("own", g.rank + 1),
        ),
        "got: the grid of call touch, which waits, depends on the rank to do",
    ),
    "many waits": (
        waits(lambda end_event, *_: [end_event[k % 4] for k in range(33)]),
        "got: call touch has 33 waits, more than 32 to do",
    ),
    "loaded extent without waits": (waits(lambda *_: [], extent=loaded), NO_COMMON),
    "loaded extent and done[i]": (
        waits(lambda end_event, counts, i, *_: [end_event[i]], extent=loaded),
        NO_COMMON,
    ),
    "loaded condition of the only wait": (
        waits(
            lambda end_event, counts, i, *_: [end_event[i].when(counts.load(i))],
            peers=True,
        ),
        "got: call touch waits for done[i] when counts[i] alone, by a loaded condition",
    ),
    "three reasons": (
        waits(
            lambda end_event, counts, i, *_: [end_event[counts.load(i)]],
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
    refused(lambda: schedule_dynamic(made(body, 2)), words, ScheduleError)


def test_a_peer_may_load_the_condition_of_a_second_wait():
    def of(
        end_event: Any, counts: Any, i: Any, here: Any, begin_event: Any
    ) -> list[Any]:
        return [end_event[i].when(counts.load(i)), begin_event[0]]

    schedule_dynamic(made(waits(of, peers=True), 2))


def waiting(g: Kit) -> None:
    """Two calls that wait, one after the other."""
    begin_event, end_event = (g.event(name, 4) for name in ("begun", "done"))
    g.do("begin", 4, notifies=[begin_event[ROW]])
    g.do("first", 4, waits=[begin_event[ROW]], notifies=[end_event[ROW]])
    g.do("second", 4, waits=[end_event[ROW]])


def test_a_call_that_is_claimed_before_a_queued_one_is_refused():
    expected = (
        "call second is claimed first, and waits for done[i], which the queued call "
        "first notifies"
    )
    words = f"got: {expected} to"
    refused(lambda: plan_dynamic(made(waiting), ["second"]), words, ScheduleError)
    plan = plan_dynamic(made(waiting), ["first", "second"])
    verify(plan, {}, workers=4)
    lanes = (replace(plan.lanes[0], claimed_calls=("second",)), plan.lanes[1])
    fault(replace(plan, lanes=lanes), expected)


@pytest.mark.parametrize("in_loop", [False, True])
def test_calls_in_loops_and_of_loaded_extents_are_not_claimed_first(in_loop):
    def body(g: Kit) -> None:
        count = g.input("count", (1,), "int32").load(0)
        end_event = g.events("done", (1,), expects=1)
        with g.loop(turn=2) if in_loop else nullcontext():
            grid = g.grid(i=4 if in_loop else up_to(4, count))
            g.do("touch", grid, waits=[end_event[0]])

    words = "got: call touch is claimed first, in a loop or a loaded extent to"
    refused(lambda: plan_dynamic(made(body), ["touch"]), words, ScheduleError)


def test_tasks_in_an_order_that_deadlocks_are_found():
    graph = made(backwards)
    verify(schedule_dynamic(graph), {}, workers=4)
    plan = plan_dynamic(graph, ["back"])
    fault(plan, "back[i=0] on rank 0 waits for done[1] on rank 0", DeadlockError)


def test_a_count_after_an_event_that_may_expect_nothing_is_refused():
    def body(g: Kit) -> None:
        count = g.input("count", (1,), "int32").load(0)
        count_event = g.events("known", (1,), expects=g.dims("n"))
        g.do("know", 2, notifies=[count_event[0]])
        g.do("touch", up_to(4, count), waits=[count_event[0]])

    reason = "known, after which it is known, may expect 0 or peers"
    refused(lambda: schedule_dynamic(made(body)), reason, ScheduleError)
