"""Planted faults: each is found, with the right error and a counterexample."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from etc_dist.errors import ArgumentError, DeadlockError, GraphError, RaceError
from etc_dist.ir import RANK, GraphFunction, tile, up_to
from etc_dist.schedule import schedule_dynamic, schedule_static
from etc_dist.verify import cells, races
from etc_dist.verify.verify import verify
from tests.graphs.kit import ROW, Kit, cycle, made, touch
from tests.graphs.rank_tiles import gather, scatter, tile_dims
from tests.refusals import refused
from tests.verify.waits import change

DIMS = {"rows": 20, "n": 20, "k": 4, **tile_dims(gather(2))}


def counted(g: Kit, expects: int) -> None:
    """One task waits for three."""
    ready = g.event(expects=expects)[0]
    g.do("send", 3, notifies=[ready])
    g.do("receive", waits=[ready])


def wrong_rank(g: Kit) -> GraphFunction:
    graph = gather(2)
    (call,) = (call for call in graph.calls if call.name == "push_rows")
    wrong = tuple(replace(ref, rank=RANK) for ref in call.notifies)
    return change(graph, "push_rows", notifies=wrong)


def sent_to_the_wrong_rank(g: Kit) -> GraphFunction:
    graph = scatter(4)
    (call,) = (call for call in graph.calls if call.name == "return_rows")
    (region,) = call.writes
    wrong = replace(region, rank=(region.rank + 1) % 4)
    return change(graph, "return_rows", writes=(wrong,))


def one_good_wait(g: Kit) -> None:
    part, ready = g.x(8)[tile(ROW, 4)], g.event("ready", 2)
    g.do("write", 2, writes=[part], notifies=[ready[ROW]])
    g.do("good", 2, lane="transfer", reads=[part], waits=[ready[ROW]])
    g.do("bad", 2, lane="transfer", reads=[part], waits=[ready[0]])


def of_a_lane(g: Kit) -> None:
    ready = g.event()[0]
    g.do("receive", waits=[ready])
    g.do("send", notifies=[ready])


def many_waits(g: Kit) -> None:
    for n in range(30):
        g.do(f"wait_{n}", waits=[g.event(f"ready_{n}")[0]])


STEP = "{} on rank {} waits for {} on rank {}, which {} on rank {} notifies "
STEPS = (
    ("a[i=0]", 0, "back[0]", 0, "b[i=0]", 0),
    ("b[i=0]", 0, "there[0]", 0, "a[i=0]", 1),
)
STEPS += (
    ("a[i=0]", 1, "back[0]", 1, "b[i=0]", 1),
    ("b[i=0]", 1, "there[0]", 1, "a[i=0]", 0),
)
CYCLE = "".join(STEP.format(*step) for step in STEPS) + "to do:"
RANKS, ONE = {"ranks": 2}, {"workers": 1}
DEFAULTS = None, "", GraphError, {}
FAULTS: dict[str, tuple[Any, ...]] = {
    # Orders
    "order": (
        lambda g: g.call(
            touch(0, 0), g.grid(i=2, j=3), order=lambda t: (t // 3, t // 2)
        ),
        "t=0 and t=1 both give [i=0, j=0]; no t gives [i=0, j=2]",
    ),
    "order beyond the grid": (
        lambda g: g.do("touch", 3, order=lambda t: (t + 1,)),
        "t=2 gives [i=3], outside of [3]",
    ),
    # Events
    "no notification": (
        lambda g: g.do("touch", 2, waits=[g.event("ready", 2)[1]]),
        "touch[i=0] on rank 0 waits for ready[1] on rank 0; the wait can never be "
        "met: it expects 1 notifications and all tasks together make 0",
        DeadlockError,
    ),
    "high count": (
        lambda g: counted(g, 4),
        "receive[i=0] on rank 0 waits for ready[0] on rank 0|make 3",
        DeadlockError,
    ),
    "low count": (
        lambda g: counted(g, 2),
        "receive[i=0] on rank 0 waits for ready[0]|expects 2 notifications and gets 3",
    ),
    "forgotten on each rank": (
        lambda g: change(scatter(2), "return_rows", notifies=()),
        "sum_ranks[turn=1, block=0, row=0, piece=0] on rank 0 waits for returned[0, 0, "
        "0]|make 0 (and 5 more like it)|can never be met|no event orders them|where: 2 "
        "ranks, 2 workers each, at rows=20, n=20, k=4, shape=0, ",
    ),
    "no wait": (
        lambda g: change(scatter(2), "sum_ranks", waits=()),
        "returned[0, 0, 0] on rank 0 is notified 1 times, and no task "
        "waits|return_rows[|sum_ranks[|no event orders them",
    ),
    "no wait for peers": (
        lambda g: change(gather(2), "multiply_peer", waits=()),
        "push_rows[|multiply_peer[|no event orders them",
    ),
    "wrong rank of a notification": (
        wrong_rank,
        "arrived[0, 0] on rank 0 is notified 1 times, and no task|waits for "
        "arrived[1, 0] on rank 0; the wait can never|on rank 1, and notifies no "
        "event of that rank",
    ),
    "rank 2 of 2": (
        lambda g: g.do("touch", notifies=[g.event(cross_rank=True).on(g.rank + 1)[0]]),
        "touch[i=0] on rank 1 names rank 2 of 2",
        GraphError,
        RANKS,
    ),
    "element": (
        lambda g: g.do("touch", 4, waits=[g.event("ready", 3, 2)[ROW, 2 - ROW]]),
        "touch[i=0] on rank 0 waits for ready[0, 2] on rank 0, outside of [3, "
        "2]|(and 1 more like it)",
    ),
    # Deadlocks
    "order of a lane": (
        of_a_lane,
        "2 tasks can never run|receive[i=0] on rank 0 waits for ready[0] on rank 0, "
        "which send[i=0] on rank 0 notifies, after receive[i=0] on rank 0 in the "
        "tensor lane of worker 0 on rank 0|order the calls of a lane",
        DeadlockError,
        ONE,
    ),
    "cycle": (
        cycle,
        f"b[i=0] on rank 1 waits for there[0] on rank 1: have 0, want 1|{CYCLE}|drop "
        f"a wait of the cycle",
        DeadlockError,
        RANKS,
    ),
    # Races
    "wait for another": (
        one_good_wait,
        "write[i=1] on rank 0 writes and bad[i=1] on rank 0 reads x[4:8] on rank",
        RaceError,
    ),
    "data for another rank": (
        sent_to_the_wrong_rank,
        "return_rows[|which no task writes|and notifies no event of that rank",
    ),
    "tickets": (
        lambda g: g.do("touch", 2, lane="transfer", writes=[g.x(1)[0]]),
        "touch[i=0] on rank 0 writes and touch[i=1] on rank 0 writes x[0:1]",
        RaceError,
        ONE,
    ),
    "roles": (
        lambda g: g.do("touch", 2, writes=[g.x(1)[0]], roles=("load", "compute")),
        "touch[i=0] on rank 0 writes and touch[i=1] on rank 0 writes",
        RaceError,
        ONE,
    ),
    "write on a peer": (
        lambda g: g.do(
            "touch", writes=[g.x(2, kind="symmetric").on((g.rank + 1) % 2)[g.rank]]
        ),
        "touch[i=0] on rank 0 writes x.on((rank + 1) % 2)[rank], on rank 1",
        RaceError,
        RANKS,
    ),
    # Coverage
    "part of an output": (
        lambda g: g.do(
            "touch", 2, writes=[g.x(5, 6, kind="output")[tile(ROW, 3), 0:4]]
        ),
        "no task writes x[0:3, 4:6] on rank 0, a part of the output",
    ),
    "output twice": (
        lambda g: (
            g.do("all", writes=[g.x(6, kind="output")[:]]),
            g.do("some", writes=[g.x()[2:3]]),
        ),
        "x[2:3] on rank 0 is written by all[i=0] on rank 0 and by some[i=0]",
        GraphError,
        ONE,
    ),
    "read of nothing": (
        lambda g: (g.do("write", writes=[g.x(8)[0:4]]), g.do("read", reads=[g.x()[:]]))[
            0
        ],
        "read[i=0] on rank 0 reads x[4:8] on rank 0, which no task writes",
        GraphError,
        ONE,
    ),
    **{
        f"read of its own {kind}": (
            lambda g, kind=kind: g.do(
                "add", 4, reads=[g.x(4, kind=kind)[ROW]], writes=[g.x()[ROW]]
            ),
            "add[i=0] on rank 0 reads x[0:1] on rank 0, which no other task has",
            GraphError,
            ONE,
        )
        for kind in ("local", "output")
    },
    "read before the write": (
        lambda g: (g.do("read", reads=[g.x(8)[:]]), g.do("write", writes=[g.x()[:]]))[
            0
        ],
        "read[i=0] on rank 0 reads x[0:8] on rank 0 before write[i=0]",
        GraphError,
        ONE,
    ),
    "region outside": (
        lambda g: g.do("touch", 3, reads=[g.x(8, kind="input")[tile(2 * ROW - 1, 4)]]),
        "touch[i=0] on rank 0 reads x[(2 * i - 1) * 4 +: 4] from [-4], outside of [8]",
    ),
    # Messages and sizes
    "30 faults": (
        many_waits,
        "graph body is not correct: 30 faults|and 10 more",
        DeadlockError,
    ),
    "grid": (
        lambda g: g.do("touch", 10**9, writes=[g.x(10**9, kind="output")[ROW]]),
        "got: 1000000000",
        ArgumentError,
    ),
    "events": (
        lambda g: g.do("touch", waits=[g.event("e", 10**9, 10**9)[0, 0]]),
        "50000000 events on all ranks",
        ArgumentError,
    ),
}
# Words that the messages do not have.
ABSENT = {
    "wait for another": "good",
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_with_a_counterexample(name) -> None:
    act, words, kind, options = (*FAULTS[name], *DEFAULTS[len(FAULTS[name]) :])
    graph = made(act, options.get("ranks", 1))
    dims = {dim.name: DIMS[dim.name] for dim in graph.dims}
    workers = options.get("workers", 2)
    error = refused(lambda: verify(schedule_static(graph), dims, workers), words, kind)
    assert type(error) is kind
    assert ABSENT.get(name, "nothing of it") not in str(error)
    assert name != "30 faults" or str(error).count("waits for") == 20


def test_an_order_that_serves_two_workers_may_not_serve_one() -> None:
    verify(schedule_static(made(of_a_lane)), {}, workers=2)


def test_many_races_of_a_graph_without_events_are_refused(monkeypatch) -> None:
    monkeypatch.setattr(races, "MOST_SUSPECTS", 0)
    graph = made(lambda g: g.do("touch", 2, writes=[g.x(8)[:]]))
    refused(lambda: verify(schedule_static(graph), {}, 2), "", RaceError)


def test_a_plan_that_lost_a_call_is_refused() -> None:
    plan = schedule_static(gather(2))
    shorter = replace(plan, lanes=plan.lanes[:1])
    refused(lambda: verify(shorter, DIMS, 2), "not each call of the graph once")


def test_a_load_beyond_its_tensor_is_refused() -> None:
    def body(g: Kit) -> None:
        at, y = g.input("at", (2,), "int32"), g.output("y", (3,), "float32")
        g.do("use", 3, writes=[y[at.load(ROW)]])

    plan = schedule_static(made(body))
    arrays = {"at": [np.array([0, 1])]}
    refused(lambda: verify(plan, {}, 1, arrays), "use[i=2] on rank 0 loads at[2]")


def test_a_proof_of_too_many_accesses_is_refused(monkeypatch):
    def body(g: Kit) -> None:
        n = g.dims("n")
        part, y = g.local("part", (n,), "float32"), g.output("y", (n,), "float32")
        g.do("sum", n, reads=[part[0 : ROW + 1]], writes=[y[tile(ROW, 1)]])

    monkeypatch.setattr(cells, "MOST_CELLS", 50)
    plan, words = schedule_static(made(body)), "of tensor part are too many|got: 55 to"
    refused(lambda: verify(plan, {"n": 10}, 1), words, ArgumentError)


@pytest.mark.parametrize("waits", [("one", "two"), ("two", "one")])
def test_an_early_read_is_not_ordered_by_the_last_wait(waits) -> None:
    def body(g: Kit) -> None:
        parts = [g.local(name, (8,), "float32") for name in ("first", "second")]
        events = {name: g.event(name, expects=4)[0] for name in ("one", "two")}
        for n, (event, part) in enumerate(zip(events.values(), parts, strict=True)):
            ends = {"writes": [part[tile(ROW, 2)]], "notifies": [event]}
            g.do(f"write_{n}", 4, lane="transfer", **ends)
        order = {"waits": [events[name] for name in waits], "reads_before_wait": (0,)}
        g.do("add", 4, reads=[part[:] for part in parts], **order)

    graph = made(body)
    if waits == ("one", "two"):
        verify(schedule_static(graph), {}, 2)
        return
    words = "write_0[i=0] on rank 0 writes and add[i=|reads early first[0:2] on rank 0"
    refused(lambda: verify(schedule_static(graph), {}, 2), words, RaceError)
    verify(schedule_dynamic(graph), {}, 2)  # where a task comes with all waits met


def test_an_early_read_may_be_overwritten_and_partly_unwritten() -> None:
    def body(g: Kit) -> None:
        a, b = (g.local(name, (8,), "float32") for name in "ab")
        first, ready = (g.event(name, expects=2)[0] for name in ("made", "ready"))
        end_event = g.event("done", expects=4)[0]
        for name, part, event in (("write_a", a, first), ("write_b", b, ready)):
            g.do(name, 2, writes=[part[tile(ROW, 2)]], notifies=[event])
        # Half of a is never written, and two of the tasks are empty.
        ends = {"reads": [a[tile(ROW, 2)], b[0:4]], "notifies": [end_event]}
        ends["writes"] = [g.output("y", (4,), "float32")[tile(ROW, 2)]]
        early = {"reads_before_wait": (0,), "gathers": (0,), "waits": [first, ready]}
        g.do("use", 4, **ends, **early)
        g.do("again", 2, writes=[a[tile(ROW, 2)]], waits=[end_event])

    verify(schedule_static(made(body)), {}, 2)


def test_the_last_wait_orders_a_write_of_what_is_read_early() -> None:
    def body(g: Kit) -> None:
        x, first, last = (
            g.x(8, kind="state")[:],
            g.event("first")[0],
            g.event("used")[0],
        )
        g.do("begin", lane="transfer", notifies=[first])
        g.do("use", lane="transfer", reads=[x], notifies=[last])
        early = {"waits": [first, last], "reads_before_wait": (0,)}
        g.do("add", reads=[x], writes=[x], **early)

    verify(schedule_static(made(body)), {}, 2)


# ------------------------------------------------------------------- loaded extents


def limited(g: Kit, kind: str) -> None:
    """Tasks of a loaded extent notify the last call."""
    counts, count_event = g.local("counts", (1,), "int32"), g.event("known")[0]
    count = counts.load(0)
    end_event = g.event("done", expects=3 if kind == "fixed" else count)[0]
    row_events, late = g.event("each", 3), g.event("late", expects=0)[0]
    g.do("count", writes=[counts[:]], notifies=[count_event])
    is_each = kind == "each"
    if is_each:
        g.do("first", waits=[row_events[0]])
    events = {"waits": [late, count_event] if kind == "late" else [count_event]}
    g.do(
        "some",
        up_to(3, count),
        **events,
        notifies=[end_event, *[row_events[ROW]] * is_each],
    )
    g.do("last", waits=[count_event, end_event])


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (
            "fixed",
            "last[i=0] on rank 0 waits for done[0] on rank 0, which tasks notify",
        ),
        (
            "each",
            "first[i=0] on rank 0 waits for each[0] on rank 0, which tasks notify",
        ),
        ("late", "writes and some[i=0] on rank 0 loads counts[0:1] on rank 0"),
    ],
)
def test_a_loaded_extent_is_right_for_all_counts(kind, text):
    verify(schedule_static(made(lambda g: limited(g, "right"))), {}, 2)
    plan = schedule_static(made(lambda g: limited(g, kind)))
    refused(lambda: verify(plan, {}, 2), text)


@pytest.mark.parametrize(("count", "tasks"), [(0, 2), (2, 4), (3, 5)])
def test_surplus_tasks_are_left_out_of_a_run_with_data(count, tasks):
    plan = schedule_static(made(lambda g: limited(g, "right")))
    proof = verify(plan, {}, 2, tensors={"counts": [np.array([count])]})
    assert proof.tasks == tasks and not proof.unchecked


def empty(g: Kit, expects: int = 1) -> None:
    """A rank notifies its peer, where only a grid with a loaded extent waits."""
    columns = g.dims("columns")
    counts = g.input("counts", (1,), "int32")
    y = g.local("y", (4, columns), "float32")
    go = g.event("go", expects=expects, cross_rank=True)
    g.do("tag", notifies=[go.on((g.rank + 1) % g.world_size)[0]])
    i, j = grid = g.grid(i=up_to(4, counts.load(0)), j=columns)
    g.do("some", grid, writes=[y[tile(i, 1), tile(j, 1)]], waits=[go[0]])


@pytest.mark.parametrize("columns", [0, 1])
@pytest.mark.parametrize("tensors", [None, {"counts": [np.array([0])] * 2}])
def test_an_empty_grid_of_a_loaded_extent_waits_for_no_event(columns, tensors):
    plan = schedule_static(made(empty, 2))
    if columns:
        verify(plan, {"columns": columns}, 2, tensors)
    else:
        with pytest.raises(GraphError, match="go.0. on rank 0 is notified 1 times"):
            verify(plan, {"columns": columns}, 2, tensors)


def test_surplus_tasks_wait_for_the_event_before_their_count():
    plan = schedule_static(made(lambda g: empty(g, expects=2), 2))
    tensors = {"counts": [np.array([0])] * 2}
    with pytest.raises(DeadlockError, match="a surplus task waits for go.0.*make 1"):
        verify(plan, {"columns": 1}, 2, tensors)


def test_the_wait_before_a_count_is_in_range():
    def body(g: Kit) -> None:
        counts, count_events = (
            g.input("counts", (1,), "int32"),
            g.event("known", expects=0),
        )
        g.do("some", up_to(3, counts.load(0)), waits=[count_events[1]])

    words = "some[i=0] on rank 0 waits for known[1] on rank 0, outside of [1]"
    refused(lambda: verify(schedule_static(made(body)), {}, 2), words)
