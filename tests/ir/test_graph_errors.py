"""What the language refuses while a graph is written, and in which words."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from etc_dist.errors import GraphError
from etc_dist.ir import (
    RANK,
    DeviceFunction,
    EventTensor,
    Graph,
    Symbol,
    Tensor,
    graph_function,
)

J = Symbol("j", "coordinate")


def function(reads: int = 0, writes: int = 0, **fields: Any) -> DeviceFunction:
    lane = fields.pop("lane", "tensor")
    return DeviceFunction("work", print, "", lane, reads, writes, **fields)


def refused(act: Callable[[], object]) -> GraphError:
    with pytest.raises(GraphError) as caught:
        act()
    return caught.value


# --------------------------------------------------------------------- expressions


@pytest.mark.parametrize("value", [1.5, "2", None, True], ids=repr)
def test_an_index_must_be_an_integer(value):
    error = refused(lambda: J + value)
    assert (error.what, error.got) == ("an index is not an integer", repr(value))


def test_a_symbolic_value_has_no_truth_value():
    error = refused(lambda: 4 if J - 4 else 5)
    assert error.where == "expression j - 4"
    assert "minimum() and maximum()" in error.fix


@pytest.mark.parametrize("name", ["//", "%"])
def test_a_constant_is_not_divided_by_zero(name):
    seven = Graph("one", 1).let("seven", 7)
    error = refused(lambda: seven // 0 if name == "//" else seven % 0)
    assert (error.where, error.got) == (f"7 {name} 0", "0")


@pytest.mark.parametrize(
    ("act", "where", "got", "fix"),
    [
        (lambda: J / 2, "j", "/ with 2", "write //, or ceildiv() to round up"),
        (lambda: 2 / (J + 1), "j + 1", "/ with 2", "write //"),
        (lambda: J**2, "j", "** with 2", "write the product out"),
        (lambda: 2**J, "j", "** with 2", "write the product out"),
        (lambda: -J, "j", "unary -", "write 0 - ..."),
    ],
    ids=["/", "/ on the right", "**", "** on the right", "unary -"],
)
def test_an_operator_that_expressions_lack_names_a_way_out(act, where, got, fix):
    error = refused(act)
    assert error.what == f"expressions have no {got.partition(' with')[0]}"
    assert (error.where, error.got) == (f"expression {where}", got)
    assert fix in error.fix


# ------------------------------------------------------------------ tensors, events


@pytest.mark.parametrize("shape", [J, 4, None], ids=["expression", "number", "none"])
@pytest.mark.parametrize("kind", ["input", "output", "local", "symmetric", "events"])
def test_a_shape_is_a_tuple(kind, shape):
    last = {"expects": 1} if kind == "events" else {"dtype": "float32"}
    error = refused(lambda: getattr(Graph("one", 1), kind)("x", shape, **last))
    assert error.what.startswith("the shape of")
    assert error.what.endswith("tensor x is no tuple")
    assert error.got == ("expression j" if shape is J else repr(shape))
    assert error.fix == "write (n,) for one axis, (m, n) for two"


def test_an_extent_that_is_no_integer_is_told_with_its_tensor():
    error = refused(lambda: Graph("one", 1).local("x", (4, 1.5), "float32"))
    assert error.where == "graph one: the shape of tensor x"


@pytest.mark.parametrize(
    ("expects", "what", "got"),
    [
        (lambda a, b: 1, "expects= cannot be called", "argument: 'b'"),
        (lambda: 1, "expects= cannot be called", "1 was given"),
        (lambda i: None, "an index is not an integer", "None"),
        ("1", "an index is not an integer", "'1'"),
    ],
    ids=["two axes", "no axis", "none", "text"],
)
def test_expected_counts_are_a_number_or_a_function_of_the_axes(expects, what, got):
    error = refused(lambda: Graph("one", 1).events("e", (4,), expects=expects))
    assert error.what == what
    assert error.where.startswith("graph one, events e")
    assert error.got.endswith(got)


def test_the_way_to_write_expected_counts_is_told():
    error = refused(lambda: Graph("one", 1).events("e", (4,), expects=lambda: 1))
    assert error.wanted == "a function of (e_0)"
    assert error.fix == "write expects=lambda i, ...: with one argument for each axis"


def test_only_a_symmetric_tensor_is_on_other_ranks():
    x = Graph("one", 2).input("x", (4,), "float32")
    error = refused(lambda: x.on(RANK + 1))
    assert error.where == "x.on(rank + 1)"
    assert error.got == "a tensor of kind 'input'"


@pytest.mark.parametrize(("dtype", "kind"), [("float32", "input"), ("int32", "output")])
def test_only_int32_of_this_rank_is_part_of_an_index(dtype, kind):
    x = getattr(Graph("one", 1), kind)("x", (4,), dtype)
    error = refused(lambda: x.load(J, 0))
    assert (error.where, error.got) == ("x.load(j, 0)", f"{dtype}, {kind}")


@pytest.mark.parametrize("index", [0, (0, 0, 0)], ids=["one", "three"])
def test_every_axis_is_indexed(index):
    g = Graph("one", 2)
    x = g.symmetric("x", (4, 4), "float32")
    e = g.events("e", (4, 4), expects=1, cross_rank=True)
    for thing in (x, x.on(1), e, e.on(1)):
        error = refused(lambda thing=thing: thing[index])
        assert "wrong number of axes" in error.what
        assert error.wanted == "2 indices"


def test_a_region_has_no_step():
    x = Graph("one", 1).input("x", (4,), "float32")
    assert refused(lambda: x[0:4:2]).got == "step 2"


def test_events_of_one_rank_are_not_on_others():
    e = Graph("one", 2).events("e", (4,), expects=1)
    error = refused(lambda: e.on(1)[0])
    assert error.what == "event tensor e is not cross-rank"


# ------------------------------------------------------------------ device functions


@pytest.mark.parametrize(
    ("fields", "got"),
    [
        ({"lane": "vector"}, "lane 'vector', cluster 1"),
        ({"cluster": 3}, "lane 'tensor', cluster 3"),
        ({"lane": "transfer", "cluster": 2}, "cluster 2"),
    ],
    ids=["lane", "cluster", "transfer"],
)
def test_a_device_function_asks_for_what_a_worker_has(fields, got):
    error = refused(lambda: function(**fields))
    assert (error.where, error.got) == ("device function work", got)


# ---------------------------------------------------------------------------- graphs


@pytest.mark.parametrize(
    "name", ["x", "rank", "t", "two words", "1st", "_hidden", ""], ids=repr
)
def test_a_name_is_an_identifier_and_used_once(name):
    g = Graph("one", 1)
    g.input("x", (4,), "float32")
    for claim in (
        lambda: g.output(name, (4,), "float32"),
        lambda: g.events(name, (4,), expects=1),
        lambda: g.let(name, J * 2),
        lambda: g.call(function(), g.grid(i=1), name=name or "x"),
    ):
        assert refused(claim).where == "graph one"


@pytest.mark.parametrize("name", ["t", "rank"])
def test_reserved_name_is_named_with_its_meaning(name):
    g = Graph("one", 1)
    for claim in (lambda: g.dims(name), lambda: g.grid(**{name: 4})):
        wanted = refused(claim).wanted
        assert "t and rank are reserved, for the task index of order=" in wanted


def test_a_body_takes_only_values_that_its_call_has():
    def body(y: Any, *, rows: int, j: int, columns: int = 0) -> None: ...

    g = Graph("one", 1)
    g.dims("rows n")
    y = g.output("y", (4,), "float32")
    work = DeviceFunction("work", body, "", "tensor", 0, 1)
    error = refused(lambda: g.call(work, g.grid(i=1), writes=[y[:]]))
    assert error.got == "j" and error.where.startswith("graph one, call work")
    assert error.wanted == "keyword-only parameters among i, n, rank, rows"
    g.call(work, g.grid(j=1), name="right", writes=[y[:]])


def test_dims_are_named_in_one_string():
    error = refused(lambda: Graph("one", 1).dims(["m", "n"]))
    assert error.what == "the names of dims are no string"
    assert (error.got, error.fix) == ("['m', 'n']", 'write g.dims("m n")')


def test_a_name_is_a_string():
    assert refused(lambda: Graph("one", 1).local(3, (4,), "int32")).got == "3"


def test_a_graph_function_is_made_of_a_function():
    error = refused(lambda: graph_function(3))
    assert error.what == "@graph_function does not stand above a function"
    assert (error.got, error.fix) == ("3", "write @graph_function above a def")


def test_the_same_function_called_twice_needs_names():
    g = Graph("one", 1)
    g.call(function(), g.grid(i=1))
    error = refused(lambda: g.call(function(), g.grid(i=1)))
    assert error.what == "the name 'work' cannot be used"
    assert "name=..." in error.fix


def test_a_dtype_must_be_known():
    error = refused(lambda: Graph("one", 1).local("x", (4,), "float64"))
    assert error.what == "tensor x has an unknown dtype"
    assert error.wanted == "bfloat16, float16, float32, int32"


def called(make: Callable[[Tensor, EventTensor], Any], word: str) -> GraphError:
    """What a call on one axis is told of `word`, made of a tensor and its events."""
    g = Graph("one", 1)
    x = g.input("x", (4, 4), "float32")
    given = make(x, g.events("e", (4,), expects=1))
    return refused(lambda: g.call(function(), g.grid(i=4), **{word: given}))


@pytest.mark.parametrize(
    ("make", "got"),
    [
        (lambda x, e: x[0, :], "Region x[0, :]"),
        (lambda x, e: x, "Tensor input x [4, 4] float32"),
        (lambda x, e: [x], "[Tensor input x [4, 4] float32]"),
        (lambda x, e: (x[0, :], e[0]), "(Region x[0, :], EventRef e[0])"),
        (lambda x, e: None, "None"),
        (lambda x, e: (x[i, :] for i in range(2)), "generator <genexpr>"),
    ],
    ids=["region", "tensor", "of a tensor", "of an event", "none", "generator"],
)
@pytest.mark.parametrize("word", ["reads", "writes"])
def test_a_call_reads_and_writes_a_list_of_regions(word, make, got):
    error = called(make, word)
    assert error.what == f"{word}= is no list of regions"
    assert (error.where, error.got) == ("graph one, call work", got)
    assert f"write {word}=[x[tile(i, 64), :]], or {word}=[x[:, :]]" in error.fix


@pytest.mark.parametrize(
    ("make", "got"),
    [
        (lambda x, e: e[J], "EventRef e[j]"),
        (lambda x, e: e, "EventTensor events e [e_0: 4] expects 1"),
        (lambda x, e: [x[0, :]], "[Region x[0, :]]"),
        (lambda x, e: [x], "[Tensor input x [4, 4] float32]"),
    ],
    ids=["element", "event tensor", "of a region", "of a tensor"],
)
@pytest.mark.parametrize("word", ["waits", "notifies"])
def test_a_call_waits_for_and_notifies_a_list_of_elements(word, make, got):
    error = called(make, word)
    assert error.what == f"{word}= is no list of elements of event tensors"
    assert (error.where, error.got) == ("graph one, call work", got)
    assert error.fix == f"write {word}=[e[i]], or {word}=[e[i, j]]"


@pytest.mark.parametrize(
    ("word", "given", "what", "got"),
    [
        ("order", 3, "order= cannot be called", "'int' object is not callable"),
        ("order", lambda: 0, "order= cannot be called", "1 was given"),
        ("order", lambda t: t, "order= returns no coordinate", "expression t"),
        ("order", lambda t: 3, "order= returns no coordinate", "3"),
        (
            "order",
            lambda t: (t, 0),
            "order= returns no coordinate",
            "(expression t, 0)",
        ),
        ("order", lambda t: ("a",), "an index is not an integer", "'a'"),
        ("empty_until", 3, "empty_until= cannot be called", "is not callable"),
        ("empty_until", lambda: 3, "empty_until= cannot be called", "1 was given"),
        ("empty_until", lambda t: None, "an index is not an integer", "None"),
        ("pace", 1.5, "an index is not an integer", "1.5"),
    ],
)
def test_maps_of_a_tasks_index_are_functions_of_it(word, given, what, got):
    error = called(lambda x, e: given, word)
    assert error.what.startswith(what)
    assert error.where.startswith("graph one, call work")
    assert error.got.endswith(got)
    if "integer" in what:
        assert error.where.endswith(f": {word}=")
    else:
        assert error.fix.startswith(f"write {word}=lambda t: ")


def test_a_fault_inside_of_an_order_stays_its_own():
    g = Graph("one", 1)
    with pytest.raises(TypeError, match="no len"):
        g.call(function(), g.grid(i=4), order=lambda t: (len(3),))


@pytest.mark.parametrize(
    ("given", "got"),
    [(lambda: 0, "function <lambda>"), (refused, "function refused"), (None, "None")],
    ids=["lambda", "undecorated", "none"],
)
def test_a_call_is_of_a_device_function(given, got):
    g = Graph("one", 1)
    error = refused(lambda: g.call(given, g.grid(i=4)))
    assert error.what == "a call of what is no device function"
    assert (error.where, error.got) == ("graph one", got)
    assert error.fix.startswith("write @device_function(")


@pytest.mark.parametrize(
    ("grid", "got"),
    [
        ((J,), "(expression j,)"),
        (J, "expression j"),
        (Graph("one", 1).grid(), "()"),
        (function(), "DeviceFunction device function work"),
    ],
    ids=["coordinates", "expression", "no axis", "function"],
)
def test_a_call_has_a_grid(grid, got):
    error = refused(lambda: Graph("one", 1).call(function(), grid))
    assert error.what == "call work has no grid of tasks"
    assert error.got == got
    assert error.fix.startswith("write i, j = grid = g.grid(i=..., j=...)")


def test_an_extent_that_is_no_integer_is_told_with_its_axis():
    error = refused(lambda: Graph("one", 1).grid(i=4, j="4"))
    assert (error.where, error.got) == ("graph one: extent of j", "'4'")


def test_operands_fit_the_device_function():
    g = Graph("one", 1)
    x = g.input("x", (4,), "float32")
    error = refused(lambda: g.call(function(1, 1), g.grid(i=1), reads=[x[:]] * 2))
    assert error.wanted == "1 reads and 1 writes"
    assert error.got == "2 reads and 0 writes"


@pytest.mark.parametrize(
    ("where", "fields"),
    [
        ("x[j]", {"writes": lambda x, e: [x[J]]}),
        ("x.on(j)[:]", {"writes": lambda x, e: [x.on(J)[:]]}),
        ("e[j]", {"waits": lambda x, e: [e[J]]}),
        ("e.on(j)[0]", {"notifies": lambda x, e: [e.on(J)[0]]}),
        ("order j", {"order": lambda x, e: lambda t: (J,)}),
        ("pace j", {"pace": lambda x, e: J}),
        ("empty until j", {"empty_until": lambda x, e: lambda t: J}),
    ],
    ids=["region", "region's rank", "wait", "notify's rank", "order", "pace", "until"],
)
def test_a_call_uses_the_coordinates_of_its_own_grid(where, fields):
    g = Graph("one", 2)
    x = g.symmetric("x", (4,), "float32")
    e = g.events("e", (4,), expects=1, cross_rank=True)
    given = {name: make(x, e) for name, make in fields.items()}
    writes = len(given.get("writes", ()))
    error = refused(lambda: g.call(function(0, writes), g.grid(i=4), **given))
    assert error.what == "call work uses unknown symbols"
    assert error.where == f"graph one, call work: {where}"
    assert error.got == "j"
    assert re.match(r"only .*\brank\b", error.wanted)


def test_an_extent_does_not_use_coordinates():
    g = Graph("one", 1)
    error = refused(lambda: g.call(function(), g.grid(k=J)))
    assert error.where == "graph one, call work: extent of k"


def test_a_call_waits_on_its_own_rank():
    g = Graph("one", 2)
    e = g.events("e", (4,), expects=1, cross_rank=True)
    error = refused(lambda: g.call(function(), g.grid(i=1), waits=[e.on(1)[0]]))
    assert error.what == "call work waits on another rank's event"
    assert error.got == "e.on(1)[0]"


def test_a_call_reads_its_own_memory():
    g = Graph("one", 2)
    x = g.symmetric("x", (4,), "float32")
    error = refused(lambda: g.call(function(1), g.grid(i=1), reads=[x.on(1)[:]]))
    assert error.what == "call work reads another rank's memory"
    assert error.fix == "let the owner write to tensor.on(reader)"


# -------------------------------------------------------------------- early reads


@pytest.mark.parametrize("field", ["gathers", "reads_before_wait"])
def test_a_function_names_what_it_reads(field):
    error = refused(lambda: function(reads=2, **{field: (0, 2)}))
    assert error.what == f"{field}= of device function work names what it does not read"
    assert (error.wanted, error.got) == ("a list of positions of its 2 reads", "(0, 2)")


def test_a_warp_does_not_read_early():
    error = refused(lambda: function(reads=1, lane="transfer", reads_before_wait=(0,)))
    assert error.wanted == "no reads_before_wait= on the transfer lane"


def test_a_task_that_waits_for_nothing_does_not_read_early():
    g = Graph("one", 1)
    x = g.input("x", (4,), "float32")
    error = refused(
        lambda: g.call(
            function(reads=1, reads_before_wait=(0,)), g.grid(i=1), reads=[x[:]]
        )
    )
    assert error.got == "0 waits, not loaded"
