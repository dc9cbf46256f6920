"""Refused loads: where a number is needed before the run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from etc_dist.errors import GraphError
from etc_dist.ir import Expr, Graph, device_function, graph_function, up_to


@device_function(source="", reads=0, writes=0)
def work():
    pass


def shape_of_a_tensor(g: Graph, number: Expr) -> None:
    g.local("z", (number,), "float32")


def shape_of_an_event_tensor(g: Graph, number: Expr) -> None:
    g.events("ready", (number,), expects=1)


def grid(g: Graph, number: Expr) -> None:
    g.call(work, g.grid(i=number))


def order(g: Graph, number: Expr) -> None:
    g.call(work, g.grid(i=4), order=lambda t: ((t + number) % 4,))


def pace(g: Graph, number: Expr) -> None:
    g.call(work, g.grid(i=4), pace=number)


@pytest.mark.parametrize("kind", ["input", "local"])
@pytest.mark.parametrize(
    ("place", "what"),
    [
        (shape_of_a_tensor, "the shape of tensor z"),
        (shape_of_an_event_tensor, "the shape of event tensor ready"),
        (grid, "the grid of call work"),
        (order, "the order of call work"),
        (pace, "the pace of call work"),
    ],
)
def test_a_number_that_is_needed_before_the_run_cannot_be_loaded(place, what, kind):
    error = refused(place, kind)
    assert error.what == f"{what} depends on a runtime tensor"
    assert error.got == "table[0]"
    assert "use an upper bound" in error.fix and "size 0" in error.fix


@pytest.mark.parametrize("kind", ["input", "local"])
def test_a_named_number_cannot_be_loaded(kind):
    error = refused(lambda g, number: g.let("many", number + 1), kind)
    assert error.where == "graph body"
    assert error.fix == "write the load in the index expressions that use it"


@pytest.mark.parametrize("index", [(), (0, 0)])
def test_a_load_names_every_axis(index):
    def body(g: Graph) -> None:
        g.local("table", (4,), "int32").load(*index)

    with pytest.raises(GraphError) as caught:
        graph_function(body)(1)
    assert (caught.value.wanted, caught.value.got) == ("1 indices", str(len(index)))


def refused(place: Callable[[Graph, Expr], object], kind: str) -> GraphError:
    def body(g: Graph) -> None:
        make = g.input if kind == "input" else g.local
        place(g, make("table", (4,), "int32").load(0))

    with pytest.raises(GraphError) as caught:
        graph_function(body)(1)
    return caught.value


@pytest.mark.parametrize(
    "options",
    [
        {"waits": lambda e, i: []},
        {"waits": lambda e, i: [e[i], e[0]]},
        {"count": lambda n, i: n.load(i)},
        {"count": lambda n, i: n.load(n.load(0))},
        {"lane": "transfer"},
        {"more": True},
        {"order": lambda t: (3 - t,)},
    ],
    ids=["no wait", "wait[i]", "count[i]", "count[count]", "lane", "two", "order"],
)
def test_a_loaded_extent_is_known_after_the_first_wait(options):
    g = Graph("body", 1)
    n, e = g.local("n", (4,), "int32"), g.events("e", (4,), expects=1)
    (i,) = g.grid(i=4)
    extents = {"i": up_to(4, options.get("count", lambda n, i: n.load(0))(n, i))}
    if "more" in options:
        extents["j"] = up_to(4, n.load(1))
    function = replace(work, lane=options.get("lane", "tensor"))
    waits = options.get("waits", lambda e, i: [e[0]])(e, i)
    with pytest.raises(GraphError) as caught:
        g.call(function, g.grid(**extents), waits=waits, order=options.get("order"))
    assert "loaded extent" in caught.value.what
    assert "i: n[" in caught.value.got and "at most 4" in caught.value.got


def test_a_count_of_an_input_needs_no_wait():
    g = Graph("body", 1)
    n = g.input("n", (4,), "int32")
    call = g.call(work, g.grid(i=up_to(4, n.load(0))))
    assert call.knows_count and not call.waits_for_count


def test_the_count_of_a_loaded_extent_is_a_load():
    g = Graph("body", 1)
    n = g.input("n", (4,), "int32")
    with pytest.raises(TypeError, match=r"the count of up_to\(\) expects a Load"):
        up_to(4, n.load(0) * 2)
