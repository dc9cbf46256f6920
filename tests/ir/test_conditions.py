"""Conditions of waits and notifications."""

from __future__ import annotations

import pytest

from etc_dist.errors import GraphError
from etc_dist.functions.push_far import push_far
from etc_dist.ir import Graph, equal
from etc_dist.ir.expr import MOST_DEPTH
from tests.graphs.kit import made
from tests.runtime.programs import send


@pytest.fixture
def g() -> Graph:
    return Graph("conditions", 2)


def test_conditions_are_shown_as_they_were_written(g):
    n = g.dims("n")
    table = g.input("table", (n,), "int32")
    (i,) = g.grid(i=n)
    ready = g.events("ready", (n,), expects=2, cross_rank=True)
    assert str(ready[i - 1].when(i > 0)) == "ready[i - 1] when 0 < i"
    place = ready.on(g.rank + 1)[i].when(table.load(i)).when(equal(i % 2, 0))
    assert str(place) == "ready.on(rank + 1)[i] when table[i] and equal(i % 2, 0)"


@pytest.mark.parametrize(("i", "expected"), [(0, 0), (1, 2), (5, 2)])
def test_a_task_waits_for_nothing_where_a_condition_does_not_hold(g, i, expected):
    (axis,) = g.grid(i=6)
    ready = g.events("ready", (6,), expects=2)[axis - 1].when(axis > 0)
    assert ready.expects.evaluate({"i": i}) == expected
    assert ready.holds.evaluate({"i": i}) == (i > 0)


def test_an_index_is_not_evaluated_where_a_condition_does_not_hold(g):
    (i,) = g.grid(i=6)
    ready = g.events("ready", (6,), expects=1)[6 // i].when(i)
    assert [part.evaluate({"i": 0}) for part in ready.parts] == [0, 0]
    assert [part.evaluate({"i": 3}) for part in ready.parts] == [1, 2]


def test_a_condition_that_python_knows_may_be_a_bool(g):
    ready = g.events("ready", (2,), expects=1)[0]
    assert ready.when(g.world_size > 1) == ready
    never = ready.when(g.world_size > 2)
    assert (never.holds.evaluate({}), never.expects.evaluate({})) == (0, 0)


def test_a_call_leaves_out_an_element_whose_condition_never_holds(g):
    x, y = g.input("x", (2,), "float32"), g.output("y", (2,), "float32")
    (i,) = grid = g.grid(i=2)
    never = g.events("ready", (2,), expects=1)[i].when(g.world_size > 2)
    call = g.call(
        send, grid, reads=[x[:]], writes=[y[:]], waits=[never], notifies=[never]
    )
    assert (call.waits, call.notifies) == ((), ())


@pytest.mark.parametrize("condition", ["i > 0", None, 0.5])
def test_other_types_of_conditions_are_a_type_error(g, condition):
    ready = g.events("ready", (2,), expects=1)[0]
    with pytest.raises(
        TypeError, match=r"ready\[0\]\.when\(\.\.\.\) expects an int or"
    ):
        ready.when(condition)


def test_a_condition_with_a_coordinate_of_another_grid_is_refused(g):
    ready = g.events("ready", (2,), expects=1)
    (j,) = g.grid(j=2)
    x, y = g.input("x", (2,), "float32"), g.output("y", (2,), "float32")
    wait = ready[0].when(j > 0)
    with pytest.raises(GraphError, match=r"ready\[0\] when 0 < j\n[^$]*got: +j"):
        g.call(send, g.grid(i=2), reads=[x[:]], writes=[y[:]], waits=[wait])


def test_a_deep_condition_is_refused(g):
    n = g.dims("n")
    for _ in range(MOST_DEPTH):
        n = (n + 1) % 7
    ready = g.events("ready", (2,), expects=1)[0]
    with pytest.raises(GraphError, match="too many nested operations"):
        ready.when(n > 0)


def sent_perhaps(g: Graph) -> None:
    x = g.symmetric("x", (4, 4), "float32")
    here = g.events("here", (1,), expects=1, cross_rank=True)
    notify = here.on(1)[0].when(g.rank < 1)
    whole = g.grid(one=1)
    g.call(
        push_far(), whole, reads=[x[:, :]], writes=[x.on(1)[:, :]], notifies=[notify]
    )


def test_a_message_to_another_host_has_its_notification():
    with pytest.raises(GraphError, match=r"and without \.when"):
        made(sent_perhaps, 2, 1)
