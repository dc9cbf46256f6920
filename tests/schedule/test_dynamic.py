"""Dynamic plans: groups and units, the same bits as static ones, and their proof."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given as drawn
from hypothesis import strategies as st

from etc_dist.ir import GraphFunction, up_to
from etc_dist.ir.tensor import numpy_dtype
from etc_dist.runtime.cpu import simulate
from etc_dist.schedule import SCHEDULES, Plan, schedule_dynamic, schedule_static
from etc_dist.verify.verify import verify
from examples.add_row_sum import add_row_sum
from examples.ring_all_gather import ring_all_gather
from tests.graphs.kit import ROW, Kit, backwards, made
from tests.graphs.mixtures import moe_few_tokens_graph, moe_graph
from tests.graphs.rank_tiles import gather, scatter, small_mlp, tile_dims

GRAPHS: dict[str, tuple[Callable[[int], GraphFunction], dict[str, int]]] = {
    "matmul_reduce_scatter": (
        scatter,
        {"rows": 20, "n": 37, "k": 300, **tile_dims(scatter(1), split=1, parts=2)},
    ),
    "all_gather_matmul": (
        gather,
        {"rows": 20, "n": 37, "k": 300, **tile_dims(gather(1), split=1, parts=2)},
    ),
    "mlp": (
        small_mlp,
        {"rows": 20, "hidden": 37, "inner": 19, **tile_dims(small_mlp(1))},
    ),
    "add_row_sum": (add_row_sum, {"rows": 328, "n": 130}),
    "ring_all_gather": (ring_all_gather, {"rows": 40, "n": 3}),
}


def inputs(
    graph: GraphFunction, dims: dict[str, int], rng: np.random.Generator
) -> list[dict[str, Any]]:
    env = graph.environment(dims, 0)
    return [
        {
            t.name: rng.standard_normal([int(n.evaluate(env)) for n in t.shape]).astype(
                numpy_dtype(t.dtype)
            )
            for t in graph.inputs()
        }
        for _ in range(graph.world_size)
    ]


# ---------------------------------------------------------------- the same bits


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("name", GRAPHS)
def test_every_seed_gives_the_bits_of_the_static_plan(name, world, rng):
    make, dims = GRAPHS[name]
    graph = make(world)
    arrays = inputs(graph, dims, rng)
    static = simulate(schedule_static(graph), arrays, dims).outputs
    plan = schedule_dynamic(graph)
    for seed in range(2):
        once = {"check": not seed}  # one proof of the plan
        dynamic = simulate(plan, arrays, dims, seed=seed, epochs=2, **once).outputs
        for results, theirs in zip(dynamic, static, strict=True):
            for tensor in graph.outputs():
                assert results[tensor.name].tobytes() == theirs[tensor.name].tobytes()


@drawn(
    world=st.integers(1, 4),
    dims=st.fixed_dictionaries(
        {name: st.integers(1, 40) for name in ("rows", "hidden", "inner")}
    ),
    workers=st.sampled_from([2, 4, 6]),
    seed=st.integers(0, 2**32 - 1),
)
def test_odd_shapes_give_the_bits_of_the_static_plan(world, dims, workers, seed):
    graph = GRAPHS["mlp"][0](world)
    dims |= tile_dims(graph)
    arrays = inputs(graph, dims, np.random.default_rng(seed))
    verify(schedule_dynamic(graph), dims, workers)
    runs = [
        simulate(make(graph), arrays, dims, seed=seed, workers=workers).outputs
        for make in (schedule_static, schedule_dynamic)
    ]
    for static, dynamic in zip(*runs, strict=True):
        assert static["y"].tobytes() == dynamic["y"].tobytes()


def test_experts_give_the_bits_of_the_static_plan(rng):
    graph = moe_graph(1, experts=8, top_k=2)
    dims = {"tokens": 40, "hidden": 16, "inner": 24}
    arrays = inputs(graph, dims, rng)
    # NOTE: unchecked, for padded rows are multiplied, which nobody writes.
    (static,) = simulate(schedule_static(graph), arrays, dims, check=False).outputs
    for seed in range(3):
        plan = schedule_dynamic(graph)
        (dynamic,) = simulate(plan, arrays, dims, seed=seed, check=False).outputs
        assert dynamic["y"].tobytes() == static["y"].tobytes()


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("name", GRAPHS)
def test_dynamic_plans_are_proved(name, world):
    make, dims = GRAPHS[name]
    assert verify(schedule_dynamic(make(world)), dims, 6).unchecked == ()


def test_seeds_take_units_in_different_orders(rng):
    make, dims = GRAPHS["mlp"]
    graph = make(2)
    plan, arrays = schedule_dynamic(graph), inputs(graph, dims, rng)
    runs = [simulate(plan, arrays, dims, seed=seed) for seed in range(4)]
    assert len({tuple((t.call, t.task) for t in run.tasks) for run in runs}) == 4


# ------------------------------------------------------------- groups and units


def groups(g: Kit) -> None:
    """A call, and one whose groups hold three tasks."""
    n = g.dims("n")
    begin_event = g.event("begun", n, expects=2)
    i, _half = grid = g.grid(i=n, half=2)
    g.do("first", grid, notifies=[begin_event[i]])
    _part, i = grid = g.grid(part=3, i=n)
    g.do("second", grid, waits=[begin_event[n - 1 - i]])


def places(plan: Plan, lane: str, env: dict[str, Any]) -> list[tuple[Any, ...]]:
    """The task of each unit of a lane, as (call, coordinate...)."""
    queue, tasks = plan.lane(lane), []
    for unit in range(int(queue.total.evaluate(env))):
        call, t = queue.find(unit, env)
        tasks.append((call.name, *call.coordinates(t, env).values()))
    return tasks


def test_tasks_of_a_group_follow_each_other():
    plan = schedule_dynamic(made(groups))
    assert places(plan, "tensor", {"n": 2, "rank": 0}) == [
        *(("first", i, half) for i in range(2) for half in range(2)),
        *(("second", part, i) for i in range(2) for part in range(3)),
    ]


def columns(g: Kit) -> None:
    """Rows, as many as are loaded, wait one by one; the last call waits for whole
    columns."""
    n, m = g.dims("n m")
    rows = g.input("rows", (1,), "int32")
    count_event, begin_event = g.event("known"), g.event("begun", n)
    column_event = g.event("done", m, expects=lambda j: 2 * rows.load(0))
    g.do("know", notifies=[count_event[0]])
    few = up_to(n, rows.load(0))
    g.do("begin", few, waits=[count_event[0]], notifies=[begin_event[ROW]])
    j, i, _half = grid = g.grid(j=m, i=few, half=2)
    g.do("go", grid, waits=[count_event[0], begin_event[i]], notifies=[column_event[j]])
    (j,) = grid = g.grid(j=m)
    g.do("end", grid, lane="transfer", waits=[count_event[0], column_event[j]])


def test_tasks_beyond_a_loaded_count_are_left_out():
    plan = schedule_dynamic(made(columns))
    for m in range(1, 4):
        verify(plan, {"n": 5, "m": m}, 2)
    for rows in range(6):
        arrays = {"rows": np.array([rows], np.int32)}
        run = simulate(plan, [arrays], {"n": 5, "m": 3}, seed=1)
        names = [record.call for record in run.tasks]
        counts = [names.count(name) for name in ("begin", "go", "end")]
        assert counts == [rows, 6 * rows, 3]


def inner_rows(g: Kit) -> None:
    """In each of two turns, rows of two columns: as many as one number says, which is
    known before all turns. No wait names a turn or a row."""
    rows, count_event = g.input("rows", (1,), "int32"), g.event("known")
    g.do("know", notifies=[count_event[0]])
    with g.loop(turn=2):
        g.do("go", g.grid(column=2, row=up_to(3, rows.load(0))), waits=[count_event[0]])


def test_groups_are_apart_by_turns_and_rows_that_may_not_exist():
    plan = schedule_dynamic(made(inner_rows))
    verify(plan, {}, 2)
    assert "go: 12 units, 6 groups by (turn, row)" in plan.show()
    for rows in range(5):
        run = simulate(plan, [{"rows": np.array([rows], np.int32)}], {}, seed=rows)
        names = [record.call for record in run.tasks]
        assert names.count("go") == 4 * min(rows, 3)


def steps(g: Kit, *, apart: bool = False, beside: bool = False, turns: int = 0) -> None:
    """`begin`, `middle` and `end`, each after all tasks of the one before. apart: a
    task of `end` waits for one of `middle`. beside: another call follows `begin`."""
    n = g.dims("n")
    begin_event, half = (
        g.event(name, turns + 1, expects=n) for name in ("begun", "half")
    )
    row_event = g.event("each", n)
    with g.loop(turn=turns) if turns else nullcontext(0) as turn:
        end_event = row_event[ROW] if apart else half[turn]
        g.do("begin", n, notifies=[begin_event[turn]])
        g.do("middle", n, waits=[begin_event[turn]], notifies=[end_event])
        g.do("end", n, waits=[end_event])
        if beside:
            g.do("beside", n, waits=[begin_event[turn]])


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({}, ("middle",)),
        ({"apart": True}, ()),
        ({"beside": True}, ()),
        ({"turns": 3}, ()),
    ],
)
def test_calls_that_no_other_can_precede_are_claimed_first(options, names):
    plan = schedule_dynamic(made(partial(steps, **options)))
    lane = plan.lane("tensor")
    assert lane.claimed_calls == names
    assert [call.name for call in lane.calls][:3] == ["begin", "middle", "end"]
    units = 7 * (1 + len(names)) * max(1, options.get("turns", 0))
    assert int(lane.initial.evaluate({"n": 7, "rank": 0})) == units
    verify(plan, {"n": 7}, 4)
    simulate(plan, [{}], {"n": 7}, workers=4)


def test_experts_are_planned_before_the_queue():
    lane = schedule_dynamic(moe_graph(1, experts=8, top_k=2)).lane("tensor")
    assert lane.claimed_calls == ("choose_experts", "list_rows", "plan_tiles")


@pytest.mark.parametrize("workers", [1, 2, 16])
@pytest.mark.parametrize("tokens", [1, 40, 150])
def test_experts_run_on_any_number_of_workers(tokens, workers, rng):
    graph = moe_few_tokens_graph(1, experts=8, top_k=2)
    if tokens > 1:
        graph = moe_graph(1, experts=8, top_k=2)
    dims = {"tokens": tokens, "hidden": 16, "inner": 24}
    arrays = inputs(graph, dims, rng)
    (static,) = simulate(schedule_static(graph), arrays, dims, check=False).outputs
    plan = schedule_dynamic(graph)
    options = {"seed": workers, "workers": workers, "epochs": 2, "check": False}
    (dynamic,) = simulate(plan, arrays, dims, **options).outputs
    assert dynamic["y"].tobytes() == static["y"].tobytes()


def test_calls_without_waits_come_first_and_keep_their_order():
    def late_start(g: Kit) -> None:
        begin_event = g.event("begun", 4)
        g.do("second", 4, waits=[begin_event[ROW]])
        g.do("first", 4, notifies=[begin_event[ROW]], order=lambda t: (3 - t,))

    plan = schedule_dynamic(made(late_start))
    assert [call.name for call in plan.lane("tensor").calls] == ["first", "second"]
    assert [call.name for call in plan.graph.calls] == ["second", "first"]
    assert places(plan, "tensor", {"rank": 0})[0] == ("first", 3)
    verify(plan, {}, 1)


def test_an_order_that_would_deadlock_statically_runs_dynamically():
    plan = schedule_dynamic(made(backwards))
    verify(plan, {}, 1)
    simulate(plan, [{}], {}, workers=1)


# ------------------------------------------------------- counts that may be zero


def counted(g: Kit) -> None:
    """Expert e is notified `counts[e]` times, by tasks that a table sends to it."""
    n, experts = g.dims("n"), 4
    counts, to = (g.input(*a, "int32") for a in (("counts", (experts,)), ("to", (n,))))
    expert_event = g.event("served", experts, expects=counts.load)
    g.do("serve", n, notifies=[expert_event[to.load(ROW)]])
    e, _part = grid = g.grid(e=experts, part=3)
    g.do("collect", grid, waits=[expert_event[e]])


def test_elements_that_expect_nothing_are_met_from_the_start():
    to = np.array([0, 2, 2, 0, 2], np.int32)
    counts = np.bincount(to, minlength=4).astype(np.int32)
    plan = schedule_dynamic(made(counted))
    tensors = {"counts": [counts], "to": [to]}
    verify(plan, {"n": 5}, 2, tensors)
    arrays = {"counts": counts, "to": to}
    for seed in range(4):
        simulate(plan, [arrays], {"n": 5}, seed=seed)


# ------------------------------------------------------------------- the choice


def test_auto_claims_tickets_where_the_work_is_loaded():
    for graph, policy in ((made(counted), "ticket"), (add_row_sum(1), "strided")):
        plan = SCHEDULES["auto"](graph)
        assert (plan.schedule, plan.lane("tensor").policy) == ("static", policy)


def test_a_plan_shows_its_queues_and_groups(golden):
    plan = schedule_dynamic(small_mlp(2))
    sizes = {"rows": 100, "hidden": 512, "inner": 128}
    golden(plan.show(132, **sizes, **tile_dims(plan.graph, split=1, parts=2)))


def test_groups_are_shown():
    plan = schedule_dynamic(made(groups))
    assert "second: n * 3 units, n groups by (i)" in plan.show()
