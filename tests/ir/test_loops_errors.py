"""Refusals of loops that cannot be correct."""

from __future__ import annotations

import pytest

from etc_dist.errors import GraphError
from etc_dist.ir import DeviceFunction, Graph

F = DeviceFunction("f", print, "f.cuh", "transfer", 0, 0)


def refused(body) -> GraphError:
    g = Graph("one", 1)
    with pytest.raises(GraphError) as caught:
        body(g)
    return caught.value


def test_a_loop_has_calls():
    def body(g: Graph) -> None:
        with g.loop(layer=4):
            pass

    assert refused(body).what == "loop layer has no calls"


@pytest.mark.parametrize("turns", [{}, {"i": 2, "j": 3}], ids=["none", "two"])
def test_a_loop_has_one_coordinate(turns):
    def body(g: Graph) -> None:
        with g.loop(**turns):
            g.call(F, g.grid(a=1))

    assert refused(body).wanted == "one argument, as in g.loop(layer=layers)"


def test_a_grid_does_not_depend_on_the_turn():
    def body(g: Graph) -> None:
        with g.loop(layer=4) as layer:
            g.call(F, g.grid(a=layer + 1))

    error = refused(body)
    assert error.what == "call f uses unknown symbols"
    assert (error.where, error.got) == ("graph one, call f: extent of a", "layer")


def test_a_turn_is_not_used_outside_of_its_loop():
    def body(g: Graph) -> None:
        x = g.input("x", (4,), "float32")
        with g.loop(layer=4) as layer:
            g.call(F, g.grid(a=1))
        reads = DeviceFunction("reads", print, "f.cuh", "transfer", 1, 0)
        g.call(reads, g.grid(b=1), reads=[x[layer]])

    assert refused(body).got == "layer"


def test_the_number_of_turns_is_known_before_a_run():
    def body(g: Graph) -> None:
        count = g.input("count", (1,), "int32")
        with g.loop(layer=count.load(0)):
            g.call(F, g.grid(a=1))

    error = refused(body)
    assert error.what == "the number of turns of loop layer depends on a runtime tensor"


def test_a_call_in_a_loop_has_no_pace():
    def body(g: Graph) -> None:
        with g.loop(layer=4):
            g.call(F, g.grid(a=1), pace=8)

    assert refused(body).what == "call f in a loop has a pace"


@pytest.mark.parametrize("kind", ["loop", "grid"])
def test_a_name_of_a_loop_is_used_once(kind):
    def body(g: Graph) -> None:
        with g.loop(layer=4):
            g.call(F, g.grid(a=1))
        if kind == "grid":
            g.grid(layer=4)
        with g.loop(layer=4):
            g.call(F, g.grid(a=1), name="again")

    assert refused(body).what == "the name 'layer' cannot be used"


def test_a_loop_without_with_is_a_type_error():
    g = Graph("one", 1)
    x, layer = g.input("x", (4,), "float32"), g.loop(layer=4)
    with pytest.raises(TypeError, match="write `with g.loop"):
        x[layer]


def test_a_loop_is_entered_once():
    def body(g: Graph) -> None:
        loop = g.loop(layer=4)
        for name in ("first", "second"):
            with loop:
                g.call(F, g.grid(a=1), name=name)

    error = refused(body)
    assert error.what == "loop layer is entered twice"
    assert error.fix.endswith("call g.loop() again, with another name")


def test_a_loop_that_is_not_left_is_refused():
    def body(g: Graph) -> None:
        g.loop(layer=4).__enter__()
        g.call(F, g.grid(a=1))
        g.finish()

    assert refused(body).what == "loop layer has no end"


def test_an_error_in_a_loop_is_raised_as_it_is():
    g = Graph("one", 1)
    with pytest.raises(ZeroDivisionError), g.loop(layer=4):
        raise ZeroDivisionError
