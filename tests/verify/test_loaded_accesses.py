"""Proofs of graphs with loads: order, ranges and unchecked parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from etc_dist.errors import ArgumentError, DeadlockError, GraphError, RaceError
from etc_dist.ir import (
    DeviceFunction,
    Expr,
    Graph,
    GraphFunction,
    Tensor,
    maximum,
    minimum,
    select,
    span,
)
from etc_dist.ir.expr import Const
from etc_dist.ir.function import TENSOR
from etc_dist.schedule import schedule_dynamic, schedule_static
from etc_dist.settings import Settings
from etc_dist.verify.proof import prove
from etc_dist.verify.verify import Verified, verify
from tests.graphs.kit import made, touch
from tests.graphs.permute import EXPERTS, computed, permute

ROUTING = [0, 2, 1, 1]


def streaming() -> DeviceFunction:
    """Streams the first of two reads."""
    roles = ("load", "compute")
    return DeviceFunction(
        "stream", print, "x.cuh", TENSOR, 2, 1, roles=roles, streams=(0,)
    )


def values(routing: list[int], **changed: list[int]) -> dict[str, list[Any]]:
    given = {"expert": np.array(routing), **computed(routing), **changed}
    return {name: [np.array(array)] for name, array in given.items()}


def check(graph: GraphFunction, tensors: Any = None, workers: int = 2) -> Verified:
    dims = {"n": 4} if graph.dims else {}
    return verify(schedule_static(graph), dims, workers, tensors)


def refused(graph: GraphFunction, tensors: Any = None, workers: int = 2) -> GraphError:
    with pytest.raises(GraphError) as caught:
        check(graph, tensors, workers)
    return caught.value


@pytest.mark.parametrize("schedule", [schedule_static, schedule_dynamic])
def test_a_graph_that_loads_what_tasks_compute_is_proved(schedule, tmp_path):
    settings = replace(Settings(), cache=tmp_path / "cache")
    prove(schedule(permute(1)), {"n": 4}, 2, settings)
    found = prove(schedule(permute(1)), {"n": 4}, 2, settings)
    assert found.show().startswith("verified permute(n=4) with 2 workers a rank")
    assert found.unchecked != ()


def test_parts_that_depend_on_values_are_named():
    assert check(permute(1)).unchecked == (
        "the expected count of filled (loads from count)",
        "call move_row, filled[expert[i]] (loads from expert)",
        "call double_rows, y[first[e] +: count[e], :] (loads from count, first)",
        "call double_rows, packed[first[e] +: count[e], :] (loads from count, first)",
        "call move_row, packed[place[i] +: 1, :] (loads from place)",
        "races and the order of remote writes",
    )


@pytest.mark.parametrize("routing", [ROUTING, [3, 3, 3, 3], [3, 2, 1, 0]])
def test_with_all_values_nothing_is_unchecked(routing):
    assert check(permute(1), values(routing)).unchecked == ()


def test_a_missing_row_of_an_output_is_found_where_the_values_are_known():
    error = refused(permute(1), values(ROUTING, first=[0, 1, 2, 4]))
    assert "y[2:3, 0:4] on rank 0 is written by" in error.got
    assert "no task writes y[3:4, 0:4]" in error.got


def test_a_wrong_count_is_a_deadlock():
    error = refused(permute(1, miscounted=1), values(ROUTING))
    assert type(error) is DeadlockError
    assert "filled[0] on rank 0; the wait can never be met: it expects 2" in error.got


def test_a_count_that_is_too_small_is_refused():
    error = refused(permute(1, miscounted=-1), values(ROUTING))
    assert "filled[0] on rank 0, which expects 0 notifications and gets 1" in error.got


@pytest.mark.parametrize("bad", [-1, EXPERTS])
def test_a_value_out_of_range_is_found_where_it_is_known(bad):
    tensors = values(ROUTING)
    tensors["expert"] = [np.array([0, bad, 1, 1])]
    error = refused(permute(1), tensors)
    assert f"move_row[i=1] on rank 0 notifies filled[{bad}] on rank 0" in error.got


@pytest.mark.parametrize(
    ("given", "wanted", "got"),
    [
        (np.zeros(3, np.int32), "expert [4]", "[3] on rank 0"),
        (np.zeros(4, np.float32), "expert: an array of int32", "float32 on rank 0"),
        (np.zeros(4, np.bool_), "expert: an array of int32", "bool on rank 0"),
    ],
)
def test_values_of_the_wrong_shape_or_dtype_are_refused(given, wanted, got):
    with pytest.raises(ArgumentError) as caught:
        check(permute(1), {"expert": [given]})
    assert (caught.value.wanted, caught.value.got) == (wanted, got)


def test_values_of_a_tensor_without_loads_are_refused():
    with pytest.raises(ArgumentError, match="the graph has no tensor x to load from"):
        check(permute(1), {"x": [np.zeros((4, 4), np.float32)]})


def test_a_load_from_another_graphs_tensor_is_refused():
    lost = Tensor("lost", (Const(4),), "int32", "local")

    def body(g: Graph) -> None:
        y = g.output("y", (4,), "float32")
        g.call(touch(0, 1), g.grid(i=1), writes=[y[span(lost.load(0), 4)]])

    with pytest.raises(GraphError, match="events of another graph") as caught:
        made(body)
    assert caught.value.got == "lost[0]"


# ------------------------------------------------------------------------------- order


def test_a_load_that_nothing_orders_after_its_write_is_refused():
    # The tasks that load wait for no element of `filled`.
    error = refused(permute(1, move_waits=False))
    assert type(error) is RaceError
    assert (
        "plan_rows[one=0] on rank 0 writes and move_row[i=0] on rank 0 loads place[0:1]"
        in error.got
    )
    assert "no event orders them (and 3 more like it)" in error.got


def test_a_count_is_loaded_once_the_waits_without_loads_are_met():
    # The wait for `filled` orders its own count too late.
    error = refused(permute(1, double_waits=False), values(ROUTING))
    assert type(error) is RaceError
    assert "double_rows[e=0] on rank 0 loads count[0:1] on rank 0" in error.got


def late(g: Graph, *, waits: bool) -> None:
    """A loaded wait orders the loads of regions, but not its own loads."""
    table = g.local("table", (2,), "int32")
    x, y = g.input("x", (4,), "float32"), g.output("y", (4,), "float32")
    first = g.events("first", (1,), expects=1)
    second = g.events(
        "second", (1,), expects=lambda k: minimum(maximum(1, table.load(k)), 1)
    )
    g.call(
        touch(0, 1),
        g.grid(a=1),
        name="count",
        writes=[table[0:1]],
        notifies=[first[0]] if waits else [],
    )
    g.call(
        touch(0, 1),
        g.grid(b=1),
        name="place",
        writes=[table[1:2]],
        waits=[first[0]] if waits else [],
        notifies=[second[0]],
    )
    g.call(
        touch(1, 1),
        g.grid(c=1),
        name="use",
        reads=[x[span(table.load(1), 4)]],
        writes=[y[:]],
        waits=[second[0], *([first[0]] if waits else [])],
    )


def test_a_loaded_wait_orders_what_the_regions_load():
    check(made(lambda g: late(g, waits=True)), workers=4)
    error = refused(made(lambda g: late(g, waits=False)), workers=4)
    assert "use[c=0] on rank 0 loads table[0:1] on rank 0" in error.got
    assert "table[1:2]" not in error.got


BEGINS_EARLY = [
    (streaming(), {"streams_after": 1}),
    (replace(touch(2, 1), loads_before_wait=True), {}),
]


@pytest.mark.parametrize("known", [0, 1])
@pytest.mark.parametrize(("function", "terms"), BEGINS_EARLY, ids=str)
def test_a_task_that_begins_early_loads_before_its_last_wait(known, function, terms):
    """Its index is written before the event of its wait `known`."""

    def body(g: Graph) -> None:
        table = g.local("table", (1,), "int32")
        x, y = g.input("x", (8,), "float32"), g.output("y", (4,), "float32")
        made = g.local("made", (4,), "float32")
        events = [g.events(name, (1,), expects=1) for name in ("first", "second")]
        outcomes = [made[:], table[:]] if known else [table[:], made[:]]
        for n, (written, event) in enumerate(zip(outcomes, events, strict=True)):
            g.call(
                touch(0, 1),
                g.grid(**{f"a{n}": 1}),
                name=f"write{n}",
                writes=[written],
                notifies=[event[0]],
            )
        g.call(
            function,
            g.grid(b=1),
            name="use",
            reads=[x[span(table.load(0), 4)], made[:]],
            writes=[y[:]],
            waits=[event[0] for event in events],
            **terms,
        )

    graph = made(body)
    verify(schedule_dynamic(graph), {}, 4)  # all waits are met before
    if known:
        error = refused(graph, workers=4)
        assert "use[b=0] on rank 0 loads table[0:1] on rank 0" in error.got
    else:
        check(graph, workers=4)


def test_no_sequence_orders_loads():
    """A lane with data-dependent tasks is not strided: nothing orders its loads."""

    def body(g: Graph) -> None:
        table = g.local("table", (1,), "int32")
        y = g.output("y", (4,), "float32")
        g.call(touch(0, 1), g.grid(a=1), name="write", writes=[table[:]])
        g.call(touch(0, 1), g.grid(b=1), name="use", writes=[y[span(table.load(0), 4)]])

    for workers in (1, 2):
        fault = refused(made(body), workers=workers).got
        assert "use[b=0] on rank 0 loads table[0:1]" in fault


def nested(g: Graph, written: int) -> None:
    at = g.input("at", (2,), "int32")
    table = g.local("table", (4,), "int32")
    y = g.output("y", (4,), "float32")
    ready = g.events("ready", (1,), expects=1)
    (i,) = grid = g.grid(i=2)
    g.call(
        touch(0, 1),
        g.grid(a=1),
        name="write",
        writes=[table[0:written]],
        notifies=[ready[0]],
    )
    first = table.load(at.load(i))
    g.call(touch(0, 1), grid, name="use", writes=[y[span(first, 2)]], waits=[ready[0]])


def test_a_load_of_any_element_needs_the_whole_tensor():
    check(made(lambda g: nested(g, 4)))
    error = refused(made(lambda g: nested(g, 3)))
    assert "use[i=0] on rank 0 loads table[3:4] on rank 0, which no task writes" in (
        error.got
    )
    tensors = {"at": [np.array([0, 2])], "table": [np.array([0, 2, 2, 2])]}
    check(made(lambda g: nested(g, 3)), tensors)


def test_a_notified_element_with_a_loaded_count_is_ordered_after_that_count():
    def body(g: Graph, *, orders: bool, cross_rank: bool = False) -> None:
        table = g.local("table", (1,), "int32")
        ready = g.events("ready", (1,), expects=1)

        def count(_: Expr) -> Expr:
            return table.load(0)

        done = g.events("done", (1,), expects=count, cross_rank=cross_rank)
        call = touch(0, 0)
        write = touch(0, 1)
        g.call(write, g.grid(a=1), name="w", writes=[table[:]], notifies=[ready[0]])
        waits = [ready[0]] if orders else []
        g.call(call, g.grid(b=1), name="n", waits=waits, notifies=[done[0]])
        g.call(call, g.grid(c=1), name="u", waits=[ready[0], done[0]])

    check(made(lambda g: body(g, orders=True)), workers=4)
    error = refused(made(lambda g: body(g, orders=False)), workers=4)
    assert "n[b=0] on rank 0 loads table[0:1]" in error.got
    # Only the waiting rank evaluates the count of a cross-rank event.
    check(made(lambda g: body(g, orders=False, cross_rank=True)), workers=4)


def test_a_task_that_writes_what_its_indices_load_is_refused():
    def body(g: Graph) -> None:
        table = g.local("table", (4,), "int32")
        y = g.output("y", (4,), "float32")
        writes = [table[:], y[table.load(1) : 4]]
        g.call(touch(0, 2), g.grid(b=1), name="add", writes=writes)

    error = refused(made(body))
    assert "add[b=0] on rank 0 writes table[1:2] on rank 0, which its own" in error.got


def loaded_twice(g: Graph, *, kind: str = "local", again: Callable[..., Any]) -> None:
    """A call writes `table`, another loads from it, a third writes `again` of it."""
    table = getattr(g, kind)("table", (4,), "int32")
    y = g.output("y", (4,), "float32")
    first, second = (g.events(name, (1,), expects=1) for name in ("first", "second"))
    write = touch(0, 1)
    w, r, a = g.grid(w=1), g.grid(r=1), g.grid(a=1)
    writes = [table[:]] if kind == "local" else [g.local("other", (4,), "int32")[:]]
    g.call(write, w, name="fill", writes=writes, notifies=[first[0]])
    loads = {"writes": [y[span(table.load(0), 4)]], "waits": [first[0]]}
    g.call(write, r, name="load", **loads, notifies=[second[0]])
    g.call(write, a, name="again", writes=[again(table)], waits=[second[0]])


def test_a_second_write_of_a_loaded_tensor_is_refused():
    error = refused(made(lambda g: loaded_twice(g, again=lambda t: t[2:3])))
    assert error.got == (
        "\n    - table[2:3] on rank 0 is written by fill[w=0] on rank 0 and by "
        "again[a=0] on rank 0"
    )
    assert "each element of a tensor that index expressions load from" in error.fix


def test_a_loaded_region_of_a_loaded_tensor_is_refused():
    error = refused(made(lambda g: loaded_twice(g, again=lambda t: t[t.load(1)])))
    assert error.got == (
        "\n    - call again writes table[table[1]], a loaded region of a tensor that "
        "index expressions load from"
    )


def test_a_write_of_an_input_that_is_loaded_is_refused():
    with pytest.raises(GraphError, match="call again writes an input"):
        made(lambda g: loaded_twice(g, kind="input", again=lambda t: t[:]))


# ------------------------------------------------------------------------------- range


def test_a_known_index_beyond_the_loaded_tensor_is_refused():
    def body(g: Graph) -> None:
        table = g.input("table", (3,), "int32")
        y = g.output("y", (8,), "float32")
        (i,) = grid = g.grid(i=4)
        g.call(touch(0, 1), grid, name="use", writes=[y[table.load(i)]])

    error = refused(made(body))
    assert "use[i=3] on rank 0 loads table[3], outside of [3]" in error.got


def test_the_parts_of_a_loaded_region_that_are_known_are_in_range():
    def body(g: Graph, start: int) -> None:
        table = g.input("table", (2,), "int32")
        x = g.input("x", (4, 4), "float32")
        (i,) = grid = g.grid(i=2)
        y = g.output("y", (2,), "float32")
        g.call(
            touch(1, 1),
            grid,
            reads=[x[table.load(i), span(i + start, 1)]],
            writes=[y[i]],
        )

    check(made(lambda g: body(g, 0)))
    error = refused(made(lambda g: body(g, -1)))
    assert "reads x[table[i], i + -1 +: 1] from [?, -1], outside of [4, 4]" in error.got


def test_known_references_to_an_event_that_others_load_are_in_range():
    def body(g: Graph) -> None:
        table = g.input("table", (2,), "int32")
        done = g.events("done", (2,), expects=1)
        (i,) = grid = g.grid(i=2)
        g.call(touch(0, 0), grid, name="n", notifies=[done[i + 1]])
        g.call(touch(0, 0), grid, name="w", waits=[done[table.load(i)]])

    assert "n[i=1] on rank 0 notifies done[2] on rank 0, outside of [2]" in (
        refused(made(body)).got
    )


def test_an_empty_task_reads_nothing():
    def body(g: Graph) -> None:
        x, y = g.local("x", (4,), "float32"), g.output("y", (2,), "float32")
        g.call(touch(0, 1), g.grid(a=1), name="write", writes=[x[0:2]])
        (i,) = grid = g.grid(i=2)
        g.call(touch(1, 1), grid, reads=[x[span(2 * i, 2)]], writes=[y[span(2 * i, 2)]])

    check(made(body), workers=1)


def test_a_load_that_select_does_not_choose_is_not_made():
    def body(g: Graph, end: int) -> None:
        table = g.input("table", (2,), "int32")
        x, y = g.input("x", (4,), "float32"), g.output("y", (4,), "float32")
        (i,) = grid = g.grid(i=4)
        row = select(i < end, table.load(i), i)
        g.call(touch(1, 1), grid, reads=[x[row]], writes=[y[i]])

    table = {"table": [np.array([3, 2])]}
    assert check(made(lambda g: body(g, 2)), table).unchecked == ()
    check(made(lambda g: body(g, 2)))
    error = refused(made(lambda g: body(g, 3)))
    assert "touch_1_1_tensor[i=2] on rank 0 loads table[2], outside of [2]" in error.got


@pytest.mark.parametrize("order", ["<", ">="])
def test_only_tasks_that_select_a_load_are_ordered_after_its_writer(order):
    def body(g: Graph) -> None:
        table, y = g.local("table", (1,), "int32"), g.output("y", (2,), "float32")
        written = g.events("written", (2,), expects=lambda i: 1 - i)
        g.call(touch(0, 1), g.grid(a=1), writes=[table[:]], notifies=[written[0]])
        (i,) = grid = g.grid(i=2)
        is_first = i < 1 if order == "<" else i >= 1
        size = select(is_first, table.load(0), 1)
        g.call(
            touch(0, 1), grid, name="r", writes=[y[span(i, size)]], waits=[written[i]]
        )

    if order == "<":
        check(made(body))
    else:
        assert "r[i=1] on rank 0 loads table[0:1]" in refused(made(body)).got
