"""Planted faults: each is found, with the right error and a counterexample."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from etc_dist.errors import ArgumentError, DeadlockError, GraphError, RaceError
from etc_dist.ir import (
    RANK,
    DeviceFunction,
    Graph,
    GraphFunction,
    graph_function,
    tile,
    up_to,
)
from etc_dist.ops.all_gather_matmul import all_gather_matmul_graph
from etc_dist.ops.matmul_reduce_scatter import matmul_reduce_scatter_graph
from etc_dist.schedule import schedule_dynamic, schedule_static
from etc_dist.verify import cells, races
from etc_dist.verify.verify import verify

DIMS = {"rows": 20, "n": 20, "k": 4}


def touch(
    reads: int, writes: int, lane: str = "tensor", cluster: int = 1
) -> DeviceFunction:
    return DeviceFunction("touch", print, "touch.cuh", lane, reads, writes, cluster)


def build(body: Callable[[Graph], None], world_size: int = 1) -> GraphFunction:
    return graph_function(body)(world_size)


def scatter(world: int = 2) -> GraphFunction:
    return matmul_reduce_scatter_graph(world, tile_size=16, piece=(8, 8))


def gather(world: int = 2) -> GraphFunction:
    return all_gather_matmul_graph(world, tile_size=16, packet_bytes=64)


def change(graph: GraphFunction, name: str, **fields: Any) -> GraphFunction:
    """`graph` with other `fields` in the call `name`."""
    calls = (replace(c, **fields) if c.name == name else c for c in graph.calls)
    return replace(graph, calls=tuple(calls))


def refused(graph: GraphFunction, workers: int = 2, **dims: int) -> GraphError:
    with pytest.raises(GraphError) as caught:
        verify(schedule_static(graph), dims, workers)
    return caught.value


# --------------------------------------------------------------------------- orders


def test_an_order_must_be_a_bijection() -> None:
    def body(g: Graph) -> None:
        grid = g.grid(i=2, j=3)
        g.call(touch(0, 0), grid, order=lambda t: (t // 3, t // 2))

    error = refused(build(body))
    assert type(error) is GraphError
    assert "t=0 and t=1 both give [i=0, j=0]; no t gives [i=0, j=2]" in error.got


def test_an_order_that_leaves_the_grid_is_refused() -> None:
    def body(g: Graph) -> None:
        g.call(touch(0, 0), g.grid(i=3), order=lambda t: (t + 1,))

    assert "t=2 gives [i=3], outside of [3]" in refused(build(body)).got


# --------------------------------------------------------------------------- events


def test_a_wait_without_notifications_is_a_deadlock() -> None:
    def body(g: Graph) -> None:
        ready = g.events("ready", (2,), expects=1)
        g.call(touch(0, 0), g.grid(i=2), waits=[ready[1]])

    error = refused(build(body))
    assert type(error) is DeadlockError
    assert (
        "touch[i=0] on rank 0 waits for ready[1] on rank 0; the wait can never be met: "
        "it expects 1 notifications and all tasks together make 0" in error.got
    )


@pytest.mark.parametrize(
    ("expects", "kind", "text"),
    [
        (4, DeadlockError, "make 3"),
        (2, GraphError, "expects 2 notifications and gets 3"),
    ],
)
def test_a_wrong_count_is_refused(
    expects: int, kind: type[GraphError], text: str
) -> None:
    def body(g: Graph) -> None:
        ready = g.events("ready", (1,), expects=expects)
        g.call(touch(0, 0), g.grid(i=3), name="send", notifies=[ready[0]])
        g.call(touch(0, 0), g.grid(i=1), name="receive", waits=[ready[0]])

    error = refused(build(body))
    assert type(error) is kind
    assert "receive[i=0] on rank 0 waits for ready[0] on rank 0" in error.got
    assert text in error.got


def test_a_forgotten_notification_is_found_on_every_rank() -> None:
    error = refused(change(scatter(), "matmul_send", notifies=()), **DIMS)
    assert "sum_slots[i=0, j=0, p=0, q=0] on rank 0 waits for ready[0, 0]" in error.got
    assert "make 0 (and 7 more like it)" in error.got


def test_a_notification_without_a_wait_is_refused() -> None:
    error = refused(change(scatter(), "sum_slots", waits=()), **DIMS)
    assert "ready[0, 0] on rank 0 is notified 2 times, and no task waits" in error.got


def test_a_notification_to_the_wrong_rank_is_found_on_both() -> None:
    graph = gather()
    push = graph.calls[1]
    wrong = tuple(replace(ref, rank=RANK) for ref in push.notifies)
    error = refused(change(graph, "push_rows", notifies=wrong), **DIMS)
    assert "arrived[0, 0] on rank 0 is notified 2 times, and no task" in error.got
    assert "waits for arrived[1, 0] on rank 0; the wait can never" in error.got
    assert "on rank 1, and notifies no event of that rank" in error.got


def test_a_rank_outside_of_the_world_is_refused() -> None:
    def body(g: Graph) -> None:
        ready = g.events("ready", (1,), expects=1, cross_rank=True)
        right = ready.on(g.rank + 1)
        g.call(touch(0, 0), g.grid(i=2), notifies=[right[0]])

    assert "touch[i=0] on rank 1 names rank 2 of 2" in refused(build(body, 2)).got


def test_an_element_out_of_range_is_refused() -> None:
    def body(g: Graph) -> None:
        ready = g.events("ready", (3, 2), expects=1)
        (i,) = grid = g.grid(i=4)
        g.call(touch(0, 0), grid, waits=[ready[i, 2 - i]])

    error = refused(build(body))
    assert (
        "touch[i=0] on rank 0 waits for ready[0, 2] on rank 0, outside of [3, 2]"
        in error.got
    )
    assert "(and 1 more like it)" in error.got


# ------------------------------------------------------------------------- deadlock


def test_a_wait_ahead_of_its_notifier_in_one_queue_is_a_deadlock() -> None:
    def body(g: Graph) -> None:
        ready = g.events("ready", (1,), expects=1)
        g.call(touch(0, 0), g.grid(i=1), name="receive", waits=[ready[0]])
        g.call(touch(0, 0), g.grid(i=1), name="send", notifies=[ready[0]])

    plan = schedule_static(build(body))
    verify(plan, {}, workers=2)
    with pytest.raises(DeadlockError) as caught:
        verify(plan, {}, workers=1)
    assert "2 tasks can never run" in caught.value.got
    assert (
        "receive[i=0] on rank 0 waits for ready[0] on rank 0, which send[i=0] on rank "
        "0 notifies, after receive[i=0] on rank 0 in the tensor lane of worker 0 on "
        "rank 0" in caught.value.got
    )
    assert "order the calls of a lane" in caught.value.fix


def test_a_cycle_across_lanes_and_ranks_is_a_deadlock() -> None:
    def body(g: Graph) -> None:
        there = g.events("there", (1,), expects=1, cross_rank=True)
        back = g.events("back", (1,), expects=1)
        peer = (g.rank + 1) % 2
        one = g.grid(i=1)
        g.call(
            touch(0, 0), one, name="a", waits=[back[0]], notifies=[there.on(peer)[0]]
        )
        b = touch(0, 0, "transfer")
        g.call(b, one, name="b", waits=[there[0]], notifies=[back[0]])

    error = refused(build(body, 2))
    assert type(error) is DeadlockError
    assert "b[i=0] on rank 1 waits for there[0] on rank 1: have 0, want 1" in error.got
    steps = (
        "a[i=0] on rank 0 waits for back[0] on rank 0, which b[i=0] on rank 0 ",
        "b[i=0] on rank 0 waits for there[0] on rank 0, which a[i=0] on rank 1 ",
        "a[i=0] on rank 1 waits for back[0] on rank 1, which b[i=0] on rank 1 ",
        "b[i=0] on rank 1 waits for there[0] on rank 1, which a[i=0] on rank 0 ",
    )
    lines = [line.strip() for line in error.got.splitlines()[-4:]]
    assert lines == [f"{step}notifies" for step in steps]
    assert "drop a wait of the cycle" in error.fix


# ---------------------------------------------------------------------------- races


def test_a_missing_wait_is_a_race() -> None:
    def body(g: Graph) -> None:
        x = g.local("x", (8,), "float32")
        ready = g.events("ready", (2,), expects=1)
        (i,) = grid = g.grid(i=2)
        g.call(
            touch(0, 1), grid, name="write", writes=[x[tile(i, 4)]], notifies=[ready[i]]
        )
        read = touch(1, 0, "transfer")
        g.call(read, grid, name="good", reads=[x[tile(i, 4)]], waits=[ready[i]])
        g.call(read, grid, name="bad", reads=[x[tile(i, 4)]], waits=[ready[0]])

    error = refused(build(body))
    assert type(error) is RaceError
    assert (
        "write[i=1] on rank 0 writes and bad[i=1] on rank 0 reads x[4:8] on rank"
        in (error.got)
    )
    assert "good" not in error.got


@pytest.mark.parametrize(
    ("make", "call", "writer"),
    [(scatter, "sum_slots", "matmul_send"), (gather, "matmul_peer", "push_rows")],
)
def test_a_collective_without_its_wait_is_a_race(make, call, writer) -> None:
    error = refused(change(make(), call, waits=()), **DIMS)
    assert f"{writer}[" in error.got and f"{call}[" in error.got
    assert "no event orders them" in error.got


def test_many_races_of_a_graph_without_events_are_refused(monkeypatch) -> None:
    monkeypatch.setattr(races, "MOST_SUSPECTS", 0)

    def body(g: Graph) -> None:
        x = g.local("x", (8,), "float32")
        g.call(touch(0, 1), g.grid(i=2), writes=[x[:]])

    assert type(refused(build(body))) is RaceError


def test_data_sent_to_the_wrong_rank_is_refused() -> None:
    graph = scatter(4)
    (region,) = graph.calls[0].writes
    assert region.rank is not None
    wrong = replace(region, rank=(region.rank + 1) % 4)
    error = refused(change(graph, "matmul_send", writes=(wrong,)), **DIMS)
    assert "matmul_send[" in error.got and "and notifies no event of that rank" in (
        error.got
    )


def test_a_ticket_lane_orders_nothing() -> None:
    def body(g: Graph) -> None:
        x = g.local("x", (1,), "float32")
        g.call(touch(0, 1, "transfer"), g.grid(i=2), writes=[x[0]])

    error = refused(build(body), workers=1)
    assert "touch[i=0] on rank 0 writes and touch[i=1] on rank 0 writes x[0:1]" in (
        error.got
    )


def test_only_a_worker_alone_runs_its_tasks_one_after_the_other() -> None:
    def body(g: Graph) -> None:
        x = g.local("x", (1,), "float32")
        g.call(touch(0, 1, cluster=2), g.grid(i=1), name="both", writes=[x[0]])
        g.call(touch(1, 0), g.grid(i=2), name="each", reads=[x[0]])
        g.call(touch(0, 1), g.grid(i=1), name="first", writes=[x[0]])

    error = refused(build(body), workers=2)
    assert "each[i=1] on rank 0 reads and first[i=0] on rank 0 writes" in error.got
    assert "both[i=0] on rank 0 writes and each[i=0] on rank 0 reads" in error.got
    assert "each[i=0] on rank 0 reads and first[i=0] on rank 0" not in error.got


def test_tasks_of_a_function_with_roles_overlap_on_one_worker() -> None:
    def body(g: Graph) -> None:
        x = g.local("x", (1,), "float32")
        function = replace(touch(0, 1), roles=("load", "compute"))
        g.call(function, g.grid(i=2), writes=[x[0]])

    error = refused(build(body), workers=1)
    assert "touch[i=0] on rank 0 writes and touch[i=1] on rank 0 writes" in error.got


@pytest.mark.parametrize("waits", [("one", "two"), ("two", "one")])
def test_an_early_read_is_not_ordered_by_the_last_wait(waits) -> None:
    def body(g: Graph) -> None:
        made = [g.local(name, (8,), "float32") for name in ("first", "second")]
        events = {name: g.events(name, (1,), expects=4) for name in ("one", "two")}
        (i,) = grid = g.grid(i=4)
        for n, (name, tensor) in enumerate(zip(events, made, strict=True)):
            writes, notifies = [tensor[tile(i, 2)]], [events[name][0]]
            options = {"writes": writes, "notifies": notifies, "name": f"write_{n}"}
            g.call(touch(0, 1, "transfer"), grid, **options)
        y = g.output("y", (8,), "float32")
        g.call(
            replace(touch(2, 1), reads_before_wait=(0,)),
            grid,
            reads=[t[:] for t in made],
            writes=[y[tile(i, 2)]],
            waits=[events[name][0] for name in waits],
            name="add",
        )

    graph = build(body)
    if waits == ("one", "two"):
        verify(schedule_static(graph), {}, 2)
        return
    error = refused(graph)
    assert isinstance(error, RaceError)
    assert "write_0[i=0] on rank 0 writes and add[i=" in error.got
    assert "reads early first[0:2] on rank 0" in error.got
    verify(schedule_dynamic(graph), {}, 2)  # where a task comes with all waits met


def test_an_early_read_may_be_overwritten_and_partly_unwritten() -> None:
    def body(g: Graph) -> None:
        a, b = (g.local(name, (8,), "float32") for name in "ab")
        made, ready = (g.events(n, (1,), expects=2) for n in ("made", "ready"))
        done = g.events("done", (1,), expects=4)
        (i,) = grid = g.grid(i=2)
        for tensor, event, name in ((a, made, "write_a"), (b, ready, "write_b")):
            writes, notifies = [tensor[tile(i, 2)]], [event[0]]
            g.call(touch(0, 1), grid, writes=writes, notifies=notifies, name=name)
        y = g.output("y", (4,), "float32")
        # Half of a is never written, and two of the tasks are empty.
        (k,) = more = g.grid(k=4)
        g.call(
            replace(touch(2, 1), reads_before_wait=(0,), gathers=(0,)),
            more,
            reads=[a[tile(k, 2)], b[0:4]],
            writes=[y[tile(k, 2)]],
            waits=[made[0], ready[0]],
            notifies=[done[0]],
            name="use",
        )
        g.call(touch(0, 1), grid, writes=[a[tile(i, 2)]], waits=[done[0]], name="again")

    verify(schedule_static(build(body)), {}, 2)


def test_the_last_wait_orders_a_write_of_what_is_read_early() -> None:
    def body(g: Graph) -> None:
        x = g.state("x", (8,), "float32")
        first, used = (g.events(name, (1,), expects=1) for name in ("first", "used"))
        one, begin = g.grid(i=1), touch(0, 0, "transfer")
        g.call(begin, one, name="begin", notifies=[first[0]])
        use = touch(1, 0, "transfer")
        g.call(use, one, name="use", reads=[x[:]], notifies=[used[0]])
        g.call(
            replace(touch(1, 1), reads_before_wait=(0,)),
            one,
            reads=[x[:]],
            writes=[x[:]],
            waits=[first[0], used[0]],
            name="add",
        )

    verify(schedule_static(build(body)), {}, 2)


def test_a_remote_write_without_a_notification_there_is_a_race() -> None:
    def body(g: Graph) -> None:
        slot = g.symmetric("slot", (2,), "float32")
        g.call(touch(0, 1), g.grid(i=1), writes=[slot.on((g.rank + 1) % 2)[g.rank]])

    error = refused(build(body, 2))
    assert type(error) is RaceError
    assert "touch[i=0] on rank 0 writes slot.on((rank + 1) % 2)[rank], on rank 1" in (
        error.got
    )


# ------------------------------------------------------------------------- coverage


def test_an_uncovered_part_of_an_output_is_refused() -> None:
    def body(g: Graph) -> None:
        y = g.output("y", (5, 6), "float32")
        (i,) = grid = g.grid(i=2)
        g.call(touch(0, 1), grid, writes=[y[tile(i, 3), 0:4]])

    assert "no task writes y[0:3, 4:6] on rank 0, a part of the output" in (
        refused(build(body)).got
    )


def test_an_output_written_twice_is_refused() -> None:
    def body(g: Graph) -> None:
        y = g.output("y", (6,), "float32")
        g.call(touch(0, 1), g.grid(i=1), name="all", writes=[y[:]])
        g.call(touch(0, 1), g.grid(i=1), name="some", writes=[y[2:3]])

    error = refused(build(body), workers=1)
    assert type(error) is GraphError
    assert "y[2:3] on rank 0 is written by all[i=0] on rank 0 and by some[i=0]" in (
        error.got
    )


def test_a_read_without_a_write_is_refused() -> None:
    def body(g: Graph) -> None:
        x = g.local("x", (8,), "float32")
        g.call(touch(0, 1), g.grid(i=1), name="write", writes=[x[0:4]])
        g.call(touch(1, 0), g.grid(i=1), name="read", reads=[x[:]])

    assert "read[i=0] on rank 0 reads x[4:8] on rank 0, which no task writes" in (
        refused(build(body), workers=1).got
    )


@pytest.mark.parametrize("kind", ["local", "output"])
def test_a_read_by_the_first_task_that_writes_is_refused(kind: str) -> None:
    def body(g: Graph) -> None:
        x = getattr(g, kind)("x", (4,), "float32")
        (i,) = grid = g.grid(i=4)
        g.call(touch(1, 1), grid, name="add", reads=[x[i]], writes=[x[i]])

    assert "add[i=0] on rank 0 reads x[0:1] on rank 0, which no other task has" in (
        refused(build(body), workers=1).got
    )


def test_a_read_before_the_first_write_is_refused() -> None:
    def body(g: Graph) -> None:
        x = g.local("x", (8,), "float32")
        g.call(touch(1, 0), g.grid(i=1), name="read", reads=[x[:]])
        g.call(touch(0, 1), g.grid(i=1), name="write", writes=[x[:]])

    error = refused(build(body), workers=1)
    assert "read[i=0] on rank 0 reads x[0:8] on rank 0 before write[i=0]" in error.got


def test_a_region_that_starts_outside_of_its_tensor_is_refused() -> None:
    def body(g: Graph) -> None:
        x, y = g.input("x", (8,), "float32"), g.output("y", (3,), "float32")
        (i,) = grid = g.grid(i=3)
        g.call(touch(1, 1), grid, reads=[x[tile(2 * i - 1, 4)]], writes=[y[i]])

    error = refused(build(body))
    assert (
        "touch[i=0] on rank 0 reads x[(2 * i - 1) * 4 +: 4] from [-4], outside of"
        in (error.got)
    )
    assert "(and 1 more like it)" in error.got


# -------------------------------------------------------------------------- message


def test_all_faults_are_gathered_and_their_number_is_capped() -> None:
    def body(g: Graph) -> None:
        for n in range(30):
            ready = g.events(f"ready_{n}", (1,), expects=1)
            g.call(touch(0, 0), g.grid(i=1), name=f"wait_{n}", waits=[ready[0]])

    error = refused(build(body))
    assert "graph body is not correct: 30 faults" in str(error)
    assert "and 10 more" in error.got and error.got.count("waits for") == 20


def test_faults_of_several_kinds_are_one_graph_error() -> None:
    error = refused(change(scatter(), "matmul_send", notifies=()), **DIMS)
    assert type(error) is GraphError
    assert "can never be met" in error.got and "no event orders them" in error.got
    assert error.where == "2 ranks, 2 workers each, at rows=20, n=20, k=4"


def test_a_plan_that_lost_a_call_is_refused() -> None:
    plan = schedule_static(gather())
    with pytest.raises(GraphError, match="not each call of the graph once"):
        verify(replace(plan, lanes=plan.lanes[:1]), DIMS, 2)


def test_a_load_beyond_its_tensor_is_refused() -> None:
    def body(g: Graph) -> None:
        at = g.input("at", (2,), "int32")
        y = g.output("y", (3,), "float32")
        (i,) = grid = g.grid(i=3)
        g.call(touch(0, 1), grid, writes=[y[at.load(i)]])

    with pytest.raises(GraphError, match=r"touch\[i=2\] on rank 0 loads at\[2\]"):
        verify(schedule_static(build(body)), {}, 1, {"at": [np.array([0, 1])]})


def test_a_grid_too_large_to_enumerate_is_refused_at_once() -> None:
    def body(g: Graph) -> None:
        x = g.output("x", (10**9,), "float32")
        (i,) = grid = g.grid(i=10**9)
        g.call(touch(0, 1), grid, writes=[x[i]])

    with pytest.raises(ArgumentError, match="got: +1000000000"):
        verify(schedule_static(build(body)), {}, 4)


def test_event_tensors_too_large_to_enumerate_are_refused_at_once() -> None:
    def body(g: Graph) -> None:
        n = g.dims("n")
        y, done = g.output("y", (1,), "float32"), g.events("done", (n, n), expects=0)
        (i,) = grid = g.grid(i=1)
        g.call(touch(0, 1), grid, writes=[y[i]], waits=[done[0, 0]])

    with pytest.raises(ArgumentError, match="50000000 events on all ranks"):
        verify(schedule_static(build(body)), {"n": 10**9}, 4)


def test_a_proof_of_too_many_accesses_is_refused(monkeypatch):
    def body(g: Graph) -> None:
        n = g.dims("n")
        part, y = g.local("part", (n,), "float32"), g.output("y", (n,), "float32")
        (i,) = grid = g.grid(i=n)
        g.call(touch(1, 1), grid, reads=[part[0 : i + 1]], writes=[y[tile(i, 1)]])

    monkeypatch.setattr(cells, "MOST_CELLS", 50)
    with pytest.raises(ArgumentError, match="of tensor part are too many") as caught:
        verify(schedule_static(build(body)), {"n": 10}, 1)
    assert caught.value.got == "55"


# ------------------------------------------------------------------- loaded extents


def limited(g: Graph, kind: str) -> None:
    """Tasks of a loaded extent notify the last call."""
    counts = g.local("counts", (1,), "int32")
    known = g.events("known", (1,), expects=1)
    number = 3 if kind == "fixed" else counts.load(0)
    done = g.events("done", (1,), expects=number)
    each = g.events("each", (3,), expects=1)
    late = g.events("late", (1,), expects=0)
    g.call(touch(0, 1), g.grid(one=1), name="count", writes=[counts[:]],
           notifies=[known[0]])  # fmt: skip
    (r,) = grid = g.grid(r=up_to(3, counts.load(0)))
    waits, notifies = [late[0], known[0]] if kind == "late" else [known[0]], [done[0]]
    if kind == "each":
        notifies.append(each[r])
        g.call(touch(0, 0), g.grid(k=1), name="first", waits=[each[0]])
    g.call(touch(0, 0), grid, name="some", waits=waits, notifies=notifies)
    g.call(touch(0, 0), g.grid(z=1), name="last", waits=[known[0], done[0]])


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (
            "fixed",
            "last[z=0] on rank 0 waits for done[0] on rank 0, which tasks notify",
        ),
        (
            "each",
            "first[k=0] on rank 0 waits for each[0] on rank 0, which tasks notify",
        ),
        ("late", "writes and some[r=0] on rank 0 loads counts[0:1] on rank 0"),
    ],
)
def test_a_loaded_extent_is_right_for_all_counts(kind, text):
    verify(schedule_static(build(lambda g: limited(g, "right"))), {}, 2)
    assert text in refused(build(lambda g: limited(g, kind))).got


@pytest.mark.parametrize(("count", "tasks"), [(0, 2), (2, 4), (3, 5)])
def test_surplus_tasks_are_left_out_of_a_run_with_data(count, tasks):
    plan = schedule_static(build(lambda g: limited(g, "right")))
    proof = verify(plan, {}, 2, tensors={"counts": [np.array([count])]})
    assert proof.tasks == tasks and not proof.unchecked


def empty(g: Graph, expects: int = 1) -> None:
    """A rank notifies its peer, where only a grid with a loaded extent waits."""
    columns = g.dims("columns")
    counts = g.input("counts", (1,), "int32")
    y = g.local("y", (4, columns), "float32")
    go = g.events("go", (1,), expects=expects, cross_rank=True)
    peer = go.on((g.rank + 1) % g.world_size)[0]
    g.call(touch(0, 0), g.grid(p=1), name="tag", notifies=[peer])
    i, j = grid = g.grid(i=up_to(4, counts.load(0)), j=columns)
    some = {"writes": [y[tile(i, 1), tile(j, 1)]], "waits": [go[0]]}
    g.call(touch(0, 1), grid, name="some", **some)


@pytest.mark.parametrize("columns", [0, 1])
@pytest.mark.parametrize("tensors", [None, {"counts": [np.array([0])] * 2}])
def test_an_empty_grid_of_a_loaded_extent_waits_for_no_event(columns, tensors):
    plan = schedule_static(build(empty, 2))
    if columns:
        verify(plan, {"columns": columns}, 2, tensors)
    else:
        with pytest.raises(GraphError, match="go.0. on rank 0 is notified 1 times"):
            verify(plan, {"columns": columns}, 2, tensors)


def test_surplus_tasks_wait_for_the_event_before_their_count():
    plan = schedule_static(build(lambda g: empty(g, expects=2), 2))
    tensors = {"counts": [np.array([0])] * 2}
    with pytest.raises(DeadlockError, match="a surplus task waits for go.0.*make 1"):
        verify(plan, {"columns": 1}, 2, tensors)


def test_the_wait_before_a_count_is_in_range():
    def body(g: Graph) -> None:
        counts = g.input("counts", (1,), "int32")
        known = g.events("known", (1,), expects=0)
        grid = g.grid(i=up_to(3, counts.load(0)))
        g.call(touch(0, 0), grid, name="some", waits=[known[1]])

    assert "some[i=0] on rank 0 waits for known[1] on rank 0, outside of [1]" in (
        refused(build(body)).got
    )
