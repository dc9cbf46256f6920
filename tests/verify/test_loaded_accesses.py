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
from tests.graphs.kit import ROW, Kit, made, touch
from tests.graphs.permute import EXPERTS, computed, permute
from tests.refusals import refused as words_of

ROUTING = [0, 2, 1, 1]


def streaming() -> DeviceFunction:
    """Streams the first of two reads."""
    roles = ("load", "compute")
    return DeviceFunction(
        "stream", print, "x.cuh", TENSOR, 2, 1, roles=roles, streams=(0,)
    )


def values(routing: list[int], **changes: list[int]) -> dict[str, list[Any]]:
    arrays = {"expert": np.array(routing), **computed(routing), **changes}
    return {name: [np.array(array)] for name, array in arrays.items()}


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
    proof = prove(schedule(permute(1)), {"n": 4}, 2, settings)
    assert proof.show().startswith("verified permute(n=4) with 2 workers a rank")
    assert proof.unchecked != ()


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


@pytest.mark.parametrize(
    ("array", "expected", "text"),
    [
        (np.zeros(3, np.int32), "expert [4]", "[3] on rank 0"),
        (np.zeros(4, np.float32), "expert: an array of int32", "float32 on rank 0"),
        (np.zeros(4, np.bool_), "expert: an array of int32", "bool on rank 0"),
    ],
)
def test_values_of_the_wrong_shape_or_dtype_are_refused(array, expected, text):
    with pytest.raises(ArgumentError) as caught:
        check(permute(1), {"expert": [array]})
    assert (caught.value.wanted, caught.value.got) == (expected, text)


def test_values_of_a_tensor_without_loads_are_refused():
    with pytest.raises(ArgumentError, match="the graph has no tensor x to load from"):
        check(permute(1), {"x": [np.zeros((4, 4), np.float32)]})


def test_a_load_from_another_graphs_tensor_is_refused():
    foreign = Tensor("lost", (Const(4),), "int32", "local")

    def body(g: Kit) -> None:
        y = g.output("y", (4,), "float32")
        g.call(touch(0, 1), g.grid(i=1), writes=[y[span(foreign.load(0), 4)]])

    with pytest.raises(GraphError, match="events of another graph") as caught:
        made(body)
    assert caught.value.got == "lost[0]"


# ------------------------------------------------------------------------------- order


def late(g: Kit, waits: bool) -> None:
    """A loaded wait orders the loads of regions, but not its own loads."""
    table, x = g.local("table", (2,), "int32"), g.input("x", (4,), "float32")
    first = [g.event("first")[0]] if waits else []
    counts = g.event("second", expects=lambda k: minimum(maximum(1, table.load(k)), 1))
    g.do("count", g.grid(a=1), writes=[table[0:1]], notifies=first)
    g.do("place", g.grid(b=1), writes=[table[1:2]], waits=first, notifies=[counts[0]])
    reads = [x[span(table.load(1), 4)]]
    g.do("use", g.grid(c=1), reads=reads, waits=[counts[0], *first])


def test_a_loaded_wait_orders_what_the_regions_load():
    check(made(lambda g: late(g, waits=True)), workers=4)
    error = refused(made(lambda g: late(g, waits=False)), workers=4)
    assert "use[c=0] on rank 0 loads table[0:1] on rank 0" in error.got
    assert "table[1:2]" not in error.got


BEGINS_EARLY = [
    (streaming(), {"streams_after": 1}),
    (replace(touch(2, 1), loads_before_wait=True), {}),
]


@pytest.mark.parametrize("is_table_last", [0, 1])
@pytest.mark.parametrize(("function", "terms"), BEGINS_EARLY, ids=str)
def test_a_task_that_begins_early_loads_before_its_last_wait(
    is_table_last, function, terms
):
    """Its index is written before the event of its wait `is_table_last`."""

    def body(g: Kit) -> None:
        table, rows = g.local("table", (1,), "int32"), g.local("made", (4,), "float32")
        x, y = g.input("x", (8,), "float32"), g.output("y", (4,), "float32")
        waits = [g.event(name)[0] for name in ("first", "second")]
        outcomes = [rows[:], table[:]] if is_table_last else [table[:], rows[:]]
        for n, (target, wait) in enumerate(zip(outcomes, waits, strict=True)):
            g.do(f"write{n}", g.grid(a=1), writes=[target], notifies=[wait])
        ends = {"reads": [x[span(table.load(0), 4)], rows[:]], "writes": [y[:]]}
        g.call(function, g.grid(b=1), name="use", **ends, waits=waits, **terms)

    graph = made(body)
    verify(schedule_dynamic(graph), {}, 4)  # all waits are met before
    if is_table_last:
        error = refused(graph, workers=4)
        assert "use[b=0] on rank 0 loads table[0:1] on rank 0" in error.got
    else:
        check(graph, workers=4)


def nested(g: Kit, num_written: int) -> None:
    at, table = g.input("at", (2,), "int32"), g.local("table", (4,), "int32")
    y, ready = g.output("y", (4,), "float32"), g.event()[0]
    g.do("write", g.grid(a=1), writes=[table[0:num_written]], notifies=[ready])
    g.do("use", 2, writes=[y[span(table.load(at.load(ROW)), 2)]], waits=[ready])


def test_a_load_of_any_element_needs_the_whole_tensor():
    check(made(lambda g: nested(g, 4)))
    error = refused(made(lambda g: nested(g, 3)))
    assert "use[i=0] on rank 0 loads table[3:4] on rank 0, which no task writes" in (
        error.got
    )
    tensors = {"at": [np.array([0, 2])], "table": [np.array([0, 2, 2, 2])]}
    check(made(lambda g: nested(g, 3)), tensors)


def test_a_notified_element_with_a_loaded_count_is_ordered_after_that_count():
    def body(g: Kit, *, orders: bool, cross_rank: bool = False) -> None:
        table, ready = g.local("table", (1,), "int32"), g.event()[0]
        count = {"expects": lambda _: table.load(0), "cross_rank": cross_rank}
        end_event = g.event("done", **count)[0]
        g.do("w", g.grid(a=1), writes=[table[:]], notifies=[ready])
        g.do("n", g.grid(b=1), waits=[ready] if orders else [], notifies=[end_event])
        g.do("u", g.grid(c=1), waits=[ready, end_event])

    check(made(lambda g: body(g, orders=True)), workers=4)
    error = refused(made(lambda g: body(g, orders=False)), workers=4)
    assert "n[b=0] on rank 0 loads table[0:1]" in error.got
    # Only the waiting rank evaluates the count of a cross-rank event.
    check(made(lambda g: body(g, orders=False, cross_rank=True)), workers=4)


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


def test_a_write_of_an_input_that_is_loaded_is_refused():
    with pytest.raises(GraphError, match="call again writes an input"):
        made(lambda g: loaded_twice(g, kind="input", again=lambda t: t[:]))


# ------------------------------------------------------------------------------- range


def beyond(g: Kit) -> None:
    table, y = g.input("table", (3,), "int32"), g.output("y", (8,), "float32")
    g.do("use", 4, writes=[y[table.load(ROW)]])


def known_part(g: Kit, start: int) -> None:
    table, x = g.input("table", (2,), "int32"), g.input("x", (4, 4), "float32")
    g.do("touch", 2, reads=[x[table.load(ROW), span(ROW + start, 1)]])


def next_event(g: Kit) -> None:
    table, events = g.input("table", (2,), "int32"), g.event("done", 2)
    g.do("n", 2, notifies=[events[ROW + 1]])
    g.do("w", 2, waits=[events[table.load(ROW)]])


def own_index(g: Kit) -> None:
    table, y = g.local("table", (4,), "int32"), g.output("y", (4,), "float32")
    g.do("add", g.grid(b=1), writes=[table[:], y[table.load(1) : 4]])


def without_events(g: Kit) -> None:
    """A lane with data-dependent tasks is not strided: nothing orders its loads."""
    table, y = g.local("table", (1,), "int32"), g.output("y", (4,), "float32")
    g.do("write", g.grid(a=1), writes=[table[:]])
    g.do("use", g.grid(b=1), writes=[y[span(table.load(0), 4)]])


KNOWN = values(ROUTING)
# The graph, its tensors, kind and words of the error; workers, default 2.
FAULTS: dict[str, tuple[Any, ...]] = {
    "a missing row": (
        permute(1),
        values(ROUTING, first=[0, 1, 2, 4]),
        GraphError,
        "y[2:3, 0:4] on rank 0 is written by|no task writes y[3:4, 0:4]",
    ),
    "a high count": (
        permute(1, miscounted=1),
        KNOWN,
        DeadlockError,
        "filled[0] on rank 0; the wait can never be met: it expects 2",
    ),
    "a low count": (
        permute(1, miscounted=-1),
        KNOWN,
        GraphError,
        "filled[0] on rank 0, which expects 0 notifications and gets 1",
    ),
    **{
        f"an event {bad}": (
            permute(1),
            KNOWN | {"expert": [np.array([0, bad, 1, 1])]},
            GraphError,
            f"move_row[i=1] on rank 0 notifies filled[{bad}] on rank 0",
        )
        for bad in (-1, EXPERTS)
    },
    # The tasks that load wait for no element of `filled`.
    "a load without a wait": (
        permute(1, move_waits=False),
        None,
        RaceError,
        "plan_rows[one=0] on rank 0 writes and move_row[i=0] on rank 0 loads place[0:1]"
        "|no event orders them (and 3 more like it)",
    ),
    # The wait for `filled` orders its own count too late.
    "a count without a wait": (
        permute(1, double_waits=False),
        KNOWN,
        RaceError,
        "double_rows[e=0] on rank 0 loads count[0:1] on rank 0",
    ),
    **{
        f"a lane of {workers} workers": (
            *(made(without_events), None, GraphError),
            *("use[b=0] on rank 0 loads table[0:1]", workers),
        )
        for workers in (1, 2)
    },
    "a load beyond": (
        made(beyond),
        None,
        GraphError,
        "use[i=3] on rank 0 loads table[3], outside of [3]",
    ),
    "a known part beyond": (
        made(lambda g: known_part(g, -1)),
        None,
        GraphError,
        "reads x[table[i], i + -1 +: 1] from [?, -1], outside of [4, 4]",
    ),
    "an event beyond": (
        made(next_event),
        None,
        GraphError,
        "n[i=1] on rank 0 notifies done[2] on rank 0, outside of [2]",
    ),
    "a second write": (
        made(lambda g: loaded_twice(g, again=lambda t: t[2:3])),
        None,
        GraphError,
        "got: - table[2:3] on rank 0 is written by fill[w=0] on rank 0 and by again"
        "[a=0] on rank 0 to do|each element of a tensor that index expressions load",
    ),
    "a loaded region of it": (
        made(lambda g: loaded_twice(g, again=lambda t: t[t.load(1)])),
        None,
        GraphError,
        "got: - call again writes table[table[1]], a loaded region of a tensor that "
        "index expressions load from to do",
    ),
    "its own index": (
        made(own_index),
        None,
        GraphError,
        "add[b=0] on rank 0 writes table[1:2] on rank 0, which its own",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_loads_is_found(name):
    graph, tensors, kind, words, *workers = FAULTS[name]
    error = words_of(lambda: check(graph, tensors, *workers), words, kind)
    assert kind is GraphError or type(error) is kind


def test_the_parts_of_a_loaded_region_that_are_known_are_in_range():
    check(made(lambda g: known_part(g, 0)))


def test_an_empty_task_reads_nothing():
    def body(g: Kit) -> None:
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
    def body(g: Kit) -> None:
        table, y = g.local("table", (1,), "int32"), g.output("y", (2,), "float32")
        write_events = g.events("written", (2,), expects=lambda i: 1 - i)
        g.call(touch(0, 1), g.grid(a=1), writes=[table[:]], notifies=[write_events[0]])
        (i,) = grid = g.grid(i=2)
        is_first = i < 1 if order == "<" else i >= 1
        size = select(is_first, table.load(0), 1)
        g.call(
            touch(0, 1),
            grid,
            name="r",
            writes=[y[span(i, size)]],
            waits=[write_events[i]],
        )

    if order == "<":
        check(made(body))
    else:
        assert "r[i=1] on rank 0 loads table[0:1]" in refused(made(body)).got
