"""What a simulation refuses: planted faults, each found and named."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from etc_dist.errors import DeadlockError, GraphError, RaceError
from etc_dist.ir import RANK, Graph, device_function, graph_function, tile
from etc_dist.runtime.cpu import simulate
from etc_dist.schedule import Plan, schedule_static
from tests.runtime.programs import (
    OPS,
    case,
    double,
    ring,
    ring_inputs,
    send,
    with_call,
)

PRODUCER = {
    "matmul_reduce_scatter": "matmul_send",
    "all_gather_matmul": "push_rows",
}
CONSUMER = {
    "matmul_reduce_scatter": "sum_slots",
    "all_gather_matmul": "matmul_peer",
}
EVENT = {"matmul_reduce_scatter": "ready", "all_gather_matmul": "arrived"}


def run_ring(plan: Plan, world: int = 3, n: int = 8, seed: int = 0) -> None:
    inputs = [ring_inputs(rank, n) for rank in range(world)]
    simulate(plan, inputs, {"n": n}, seed=seed)


@pytest.mark.parametrize("op", OPS)
def test_a_missing_notify_is_a_deadlock(op, rng, seed):
    c = case(op, 3, rng)
    plan = with_call(c.plan, PRODUCER[op], notifies=())
    with pytest.raises(DeadlockError) as caught:
        simulate(plan, c.inputs, c.dims, seed=seed)
    assert f": {CONSUMER[op]}[" in caught.value.got
    assert f"waits for {EVENT[op]}[" in caught.value.got
    assert "have 0, want" in caught.value.got
    assert "left to notify it: no task" in caught.value.got


def test_a_deadlock_names_rank_worker_lane_task_and_event():
    plan = with_call(schedule_static(ring(1)), "send", notifies=())
    with pytest.raises(DeadlockError) as caught:
        run_ring(plan, world=1, n=4)
    assert caught.value.got == (
        "rank 0, worker 0, tensor lane: double[0] waits for here[0]: have 0, want 1; "
        "left to notify it: no task"
    )


@pytest.mark.parametrize("op", OPS)
def test_an_expected_count_that_is_too_high_is_a_deadlock(op, rng, seed):
    c = case(op, 3, rng)
    with pytest.raises(DeadlockError, match=rf"{EVENT[op]}\[.*have \d+, want \d+"):
        simulate(with_count(c.plan, EVENT[op], 1), c.inputs, c.dims, seed=seed)


@pytest.mark.parametrize("op", OPS)
def test_an_expected_count_that_is_too_low_is_found(op, rng, seed):
    c = case(op, 3, rng)
    with pytest.raises(GraphError) as caught:
        simulate(with_count(c.plan, EVENT[op], -1), c.inputs, c.dims, seed=seed)
    assert f"{EVENT[op]}[" in str(caught.value)
    assert f": {PRODUCER[op]}[" in str(caught.value)


def with_count(plan: Plan, name: str, change: int) -> Plan:
    """The plan with the expected count of event tensor `name` changed."""
    old = plan.graph.event(name)
    new = replace(old, expects=old.expects + change)
    calls = tuple(
        replace(
            call,
            waits=tuple(replace(ref, events=new) for ref in call.waits),
            notifies=tuple(replace(ref, events=new) for ref in call.notifies),
        )
        for call in plan.graph.calls
    )
    return schedule_static(replace(plan.graph, events=(new,), calls=calls))


def test_one_notification_too_many_is_named():
    plan = schedule_static(ring(3))
    twice = plan.graph.calls[0].notifies * 2
    with pytest.raises(GraphError) as caught:
        run_ring(with_call(plan, "send", notifies=twice))
    assert "is notified more often than expected" in caught.value.what
    assert "of rank" in caught.value.what
    assert ": send[" in caught.value.where
    assert caught.value.wanted == "1 notifications in an epoch"


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("op", OPS)
def test_a_missing_wait_is_a_race(op, seed, rng):
    c = case(op, 3, rng)
    plan = with_call(c.plan, CONSUMER[op], waits=())
    with pytest.raises(RaceError) as caught:
        simulate(plan, c.inputs, c.dims, seed=seed)
    tensor = {"matmul_reduce_scatter": "slots", "all_gather_matmul": "gathered"}[op]
    assert f"two tasks touch {tensor}[" in caught.value.what
    assert f": {CONSUMER[op]}[" in caught.value.where
    assert f": {PRODUCER[op]}[" in caught.value.wanted
    assert f"notifies {EVENT[op]}[" in caught.value.wanted


def test_a_race_names_both_tasks_the_element_and_the_event():
    plan = with_call(schedule_static(ring(1)), "double", waits=())
    with pytest.raises(RaceError) as caught:
        run_ring(plan, world=1, n=4)
    assert caught.value.what == "two tasks touch box[0] of rank 0 in no order"
    assert "double[0] reads it (epoch 1), having waited for nothing" in str(
        caught.value
    )
    assert "send[0], which notifies here[0] of rank 0" in caught.value.wanted
    assert ": send[0] writes it" in caught.value.got


@pytest.mark.parametrize("seed", range(4))
def test_a_notification_of_the_wrong_rank_is_found(seed):
    plan = schedule_static(ring(3))
    (ref,) = plan.graph.calls[0].notifies
    wrong = replace(ref, rank=(RANK + 2) % 3)
    with pytest.raises(GraphError) as caught:
        run_ring(with_call(plan, "send", notifies=(wrong,)), seed=seed)
    assert "here[" in str(caught.value)
    assert "rank 0" in str(caught.value)
    assert "send[" in str(caught.value)


@pytest.mark.parametrize("seed", range(4))
def test_data_sent_to_the_wrong_rank_is_found(seed, rng):
    c = case("matmul_reduce_scatter", 4, rng)
    (region,) = c.plan.graph.calls[0].writes
    assert region.rank is not None
    wrong = replace(region, rank=(region.rank + 1) % 4)
    plan = with_call(c.plan, "matmul_send", writes=(wrong,))
    with pytest.raises(RaceError) as caught:
        simulate(plan, c.inputs, c.dims, seed=seed)
    assert "slots[" in caught.value.what
    assert "matmul_send[" in str(caught.value)


@graph_function
def crossed(g: Graph) -> None:
    """Two tasks of one lane, each of which waits for the other."""
    x = g.input("x", (4,), "float32")
    boxes = [g.local(name, (4,), "float32") for name in ("left", "right")]
    events = [g.events(name, (1,), expects=1) for name in ("first", "second")]
    for me in (0, 1):
        g.call(
            send,
            g.grid(i=1),
            name=f"step{me}",
            reads=[x[:]],
            writes=[boxes[me][:]],
            waits=[events[1 - me][0]],
            notifies=[events[me][0]],
        )


def test_a_deadlock_shows_the_circle():
    with pytest.raises(DeadlockError) as caught:
        inputs = [{"x": np.ones(4, np.float32)}]
        simulate(schedule_static(crossed(1)), inputs, {}, workers=2)
    circle = caught.value.got.partition("in a circle:")[2]
    assert "step0[0] waits for second[0], for rank 0 step1[0]" in circle
    assert "step1[0] waits for first[0], for rank 0 step0[0]" in circle


@graph_function
def backwards(g: Graph) -> None:
    """The consumer is before its producer in the queue of the same lane."""
    n = 4
    x = g.input("x", (n, 4), "float32")
    y = g.output("y", (n, 4), "float32")
    box = g.local("box", (n, 4), "float32")
    there = g.events("there", (n,), expects=1)
    (i,) = grid = g.grid(i=n)
    g.call(
        double,
        grid,
        name="use",
        reads=[box[i, :]],
        writes=[y[i, :]],
        waits=[there[i]],
    )
    g.call(
        double,
        g.grid(i=n),
        name="make",
        reads=[x[i, :]],
        writes=[box[i, :]],
        notifies=[there[i]],
    )


def test_too_few_workers_are_a_deadlock_that_more_workers_solve():
    plan = schedule_static(backwards(1))
    x = np.ones((4, 4), np.float32)
    with pytest.raises(DeadlockError) as caught:
        simulate(plan, [{"x": x}], {}, workers=4)
    assert "left to notify it: rank 0 make[0]" in caught.value.got
    assert "in a circle:" in caught.value.got
    run = simulate(plan, [{"x": x}], {}, workers=8)
    assert run.outputs[0]["y"].tolist() == [[4.0] * 4] * 4


@graph_function
def chained(g: Graph) -> None:
    """A lane of clusters of two whose workers run a task each: the second reads what
    the first wrote, in the same unit."""
    x = g.input("x", (4,), "float32")
    y = g.output("y", (4,), "float32")
    box = g.local("box", (3, 4), "float32")
    paired = replace(double, name="paired", cluster=2)
    g.call(paired, g.grid(i=1), reads=[x[:]], writes=[box[0, :]])
    (i,) = grid = g.grid(i=2)
    g.call(double, grid, name="alone", reads=[box[i, :]], writes=[box[i + 1, :]])
    g.call(paired, g.grid(i=1), name="last", reads=[box[2, :]], writes=[y[:]])


def test_two_workers_of_a_cluster_are_not_in_order():
    inputs = [{"x": np.ones(4, np.float32)}]
    with pytest.raises(RaceError) as caught:
        simulate(schedule_static(chained(1)), inputs, {}, workers=2)
    assert "worker 1, tensor lane: alone[1] reads it" in caught.value.where
    assert "worker 0, tensor lane: alone[0]" in caught.value.wanted


@graph_function
def looked_up(g: Graph, *, waits: bool) -> None:
    """y is the row of x that a task writes the number of."""
    x = g.input("x", (3, 4), "float32")
    number = g.input("number", (1,), "int32")
    y = g.output("y", (4,), "float32")
    table = g.local("table", (1,), "int32")
    known = g.events("known", (1,), expects=1)
    g.call(
        send,
        g.grid(i=1),
        reads=[number[:]],
        writes=[table[:]],
        notifies=[known[0]],
    )
    g.call(
        double,
        g.grid(i=1),
        reads=[x[table.load(0), :]],
        writes=[y[:]],
        waits=[known[0]] if waits else [],
    )


@pytest.mark.parametrize("seed", range(6))
def test_a_load_that_nothing_orders_after_its_write_is_a_race(seed):
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    inputs = [{"x": x, "number": np.array([2], np.int32)}]
    run = simulate(schedule_static(looked_up(1, waits=True)), inputs, {}, seed=seed)
    assert run.outputs[0]["y"].tolist() == [16, 18, 20, 22]
    with pytest.raises(RaceError, match=r"two tasks touch table\[0\] of rank 0"):
        simulate(schedule_static(looked_up(1, waits=False)), inputs, {}, seed=seed)


@graph_function
def copies(g: Graph, *, rows: int = 2, wide: int = 4, count: int = 2) -> None:
    """y = 2 x, each task writing `rows` rows of its own one on."""
    x = g.input("x", (2, 4), "float32")
    y = g.output("y", (2, 4), "float32")
    (i,) = grid = g.grid(i=count)
    g.call(
        double,
        grid,
        reads=[x[tile(i, rows), 0:wide]],
        writes=[y[tile(i, rows), 0:wide]],
    )


def run_copies(plan: Plan) -> None:
    simulate(plan, [{"x": np.ones((2, 4), np.float32)}], {}, workers=1)


def test_an_output_element_that_is_never_written_is_named():
    with pytest.raises(GraphError) as caught:
        run_copies(schedule_static(copies(1, rows=1, wide=3)))
    assert caught.value.where.endswith("rank 0: y[0, 3] is the first")
    assert caught.value.got == "2 were not"


def test_a_body_that_leaves_output_unwritten_is_found():
    @device_function(source="", reads=1, writes=1)
    def lazy(x, y):
        y[0] = x[0]

    plan = schedule_static(copies(1, count=1))
    with pytest.raises(GraphError, match=r"y\[1, 0\] is unwritten, the first of 4"):
        run_copies(with_call(plan, "double", function=lazy))


def test_a_second_write_of_an_output_element_is_named():
    plan = schedule_static(copies(1, rows=1))
    (region,) = plan.graph.calls[0].writes
    twice = replace(region, start=(region.start[0] * 0, region.start[1]))
    with pytest.raises(GraphError) as caught:
        run_copies(with_call(plan, "double", writes=(twice,)))
    assert caught.value.what == "y[0, 0] of rank 0 is written twice"
    assert "double[1]" in caught.value.where


def test_a_read_of_what_no_task_writes_is_named():
    plan = with_call(schedule_static(ring(1)), "send", writes=())
    plan = schedule_static(
        replace(plan.graph, calls=(replace(plan.graph.calls[1], waits=()),))
    )
    with pytest.raises(GraphError, match=r"box\[0\] of rank 0 is read, and no task"):
        run_ring(plan, world=1, n=4)


def test_a_notification_that_its_rank_does_not_wait_for_is_found():
    plan = schedule_static(ring(2))
    plan = schedule_static(replace(plan.graph, calls=plan.graph.calls[:1]))
    plan = schedule_static(replace(plan.graph, tensors=plan.graph.tensors[:2]
                                   + plan.graph.tensors[3:]))  # fmt: skip
    with pytest.raises(GraphError, match="may end an epoch while a peer still enters"):
        run_ring(plan, world=2)


def test_an_element_that_is_not_there_is_named():
    plan = schedule_static(ring(2))
    (ref,) = plan.graph.calls[1].waits
    wrong = replace(ref, index=(ref.index[0] + 1,))
    with pytest.raises(GraphError) as caught:
        run_ring(with_call(plan, "double", waits=(wrong,)), world=2)
    assert "double[1]: here[i + 1]" in caught.value.where
    assert (caught.value.wanted, caught.value.got) == ("an index within [2]", "2")


def test_a_rank_that_is_not_there_is_named():
    plan = schedule_static(ring(2))
    (ref,) = plan.graph.calls[0].notifies
    with pytest.raises(GraphError, match="a rank of 0 .. 1"):
        run_ring(
            with_call(plan, "send", notifies=(replace(ref, rank=RANK + 1),)), world=2
        )


def test_an_error_in_a_body_says_where_it_was():
    @device_function(source="", reads=1, writes=1)
    def broken(x, y):
        raise ValueError("of the body's own")

    plan = with_call(schedule_static(copies(1, rows=1)), "double", function=broken)
    with pytest.raises(ValueError, match="own") as caught:
        run_copies(plan)
    assert caught.value.__notes__ == ["in rank 0, worker 0, tensor lane: double[0]"]


def test_a_body_that_returns_its_result_is_refused():
    @device_function(source="", reads=1, writes=1)
    def doubled(x, y):
        return 2 * x

    plan = with_call(schedule_static(copies(1, rows=1)), "double", function=doubled)
    with pytest.raises(GraphError) as caught:
        run_copies(plan)
    assert caught.value.what.startswith("the body of call double returned a value")
    assert caught.value.where == "rank 0, worker 0, tensor lane: double[0]"
    assert caught.value.wanted.startswith("None: ")
    assert caught.value.got == "ndarray"
    assert caught.value.fix.startswith("in doubled, assign to y[...]")


@pytest.mark.parametrize("rows", [1, 2])
def test_a_body_that_writes_what_it_reads_fails(rows):
    @device_function(source="", reads=1, writes=1)
    def halves(x, y):
        y[...] = x
        x *= 0.5

    count = 2 // rows
    plan = schedule_static(copies(1, rows=rows, count=count))
    with pytest.raises(ValueError, match="read-only") as caught:
        run_copies(with_call(plan, "double", function=halves))
    assert caught.value.__notes__ == ["in rank 0, worker 0, tensor lane: double[0]"]


def test_without_check_faults_go_unseen():
    simulate(
        with_call(schedule_static(ring(1)), "double", waits=()),
        [ring_inputs(0, 8)],
        {"n": 8},
        check=False,
    )


def test_a_simulation_that_is_too_long_is_ended():
    with pytest.raises(GraphError, match="does not end"):
        inputs = [ring_inputs(0, 8)]
        simulate(schedule_static(ring(1)), inputs, {"n": 8}, step_limit=3)
