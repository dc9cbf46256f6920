"""Refused graphs: TypeErrors and GraphErrors."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from etc_dist.errors import ArgumentError, GraphError
from etc_dist.ir import (
    RANK,
    DeviceFunction,
    Graph,
    Symbol,
    graph_function,
    tile,
)

J = Symbol("j", "coordinate")


def function(reads: int = 0, writes: int = 0, **fields: Any) -> DeviceFunction:
    lane = fields.pop("lane", "tensor")
    return DeviceFunction("work", print, "", lane, reads, writes, **fields)


def call_with_values(values: dict[str, Any]) -> None:
    """A call of a body that takes `rows`, in a graph with the dim n."""

    def body(y: Any, *, rows: int) -> None: ...

    g = Graph("one", 1)
    g.dims("n")
    y, grid = g.output("y", (4,), "float32"), g.grid(i=1)
    work = DeviceFunction("work", body, "", "tensor", 0, 1)
    g.call(work, grid, writes=[y[:]], values=values)


def refused(act: Callable[[], object]) -> GraphError:
    with pytest.raises(GraphError) as caught:
        act()
    return caught.value


# --------------------------------------------------------------------------- types


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda g: J + 1.5, "expects an int or an expression, got 1.5"),
        (
            lambda g: tile(g.grid(i=4), 2),
            "unpack a grid, as in (i,)",
        ),
        (lambda g: J / 2, "expression j has no operator /: write //, or ceildiv()"),
        (lambda g: 2**J, "expression j has no operator **"),
        (lambda g: -J, "expression j has no operator unary -: write 0 - ..."),
        (lambda g: g.dims(["m", "n"]), "g.dims() expects a str, got list"),
        (lambda g: g.local(3, (4,), "int32"), "a name in graph one expects a str"),
        (lambda g: g.local("x", 4, "int32"), "the shape of tensor x expects a tuple"),
        (lambda g: g.local("x", (4, "4"), "int32"), "the shape of tensor x expects"),
        (lambda g: g.local("x", (4,), int), "x expects a str, got type; it is one of"),
        (lambda g: g.events("e", J, expects=1), "the shape of event tensor e expects"),
        (lambda g: g.events("e", (4,), expects="1"), "events e: expects= expects an"),
        (lambda g: g.events("e", (4,), expects=lambda: 1), "takes 0 positional"),
        (lambda g: g.grid(i=4, j="4"), "extent of j expects an int"),
        (lambda g: g.call(print, g.grid(i=4)), "g.call() expects a DeviceFunction"),
        (lambda g: g.call(function, g.grid(i=4)), "makes one, call it: function(...)"),
        (lambda g: g.call(function(), (J,)), "the grid of g.call() expects a Grid"),
        (lambda g: graph_function(3), "@graph_function expects a function, got int"),
    ],
)
def test_wrong_type_is_a_type_error(act, message):
    with pytest.raises(TypeError, match=re.escape(message)):
        act(Graph("one", 1))


@pytest.mark.parametrize(
    ("word", "make", "message"),
    [
        ("reads", lambda x, e: x[0], "reads= expects a list or tuple, got Region"),
        (
            "writes",
            lambda x, e: [x],
            "call work: writes= expects a Region, got Tensor; ",
        ),
        ("reads", lambda x, e: [x], "index each axis of x, as in x[...]"),
        ("waits", lambda x, e: [x[0]], "waits= expects an EventRef, got Region"),
        ("notifies", lambda x, e: e, "notifies= expects a list or tuple"),
        ("order", lambda x, e: lambda t: t, "order= expects a tuple or list"),
        ("order", lambda x, e: lambda t: (len(3),), "no len"),
        ("pace", lambda x, e: 1.5, "pace= expects an int"),
        ("values", lambda x, e: [1], "values= expects a Mapping"),
        ("values", lambda x, e: {"n": "4"}, "values= expects an int"),
        ("values", lambda x, e: {4: 4}, "values= expects a str, got int"),
    ],
)
def test_wrong_type_in_a_call_is_a_type_error(word, make, message):
    g = Graph("one", 1)
    x, e = g.input("x", (4,), "float32"), g.events("e", (4,), expects=1)
    with pytest.raises(TypeError, match=re.escape(message)):
        g.call(function(), g.grid(i=4), **{word: make(x, e)})


# --------------------------------------------------------------------- expressions


def test_a_symbolic_value_has_no_truth_value():
    error = refused(lambda: 4 if J - 4 else 5)
    assert error.where == "expression j - 4"
    assert "minimum() and maximum()" in error.fix


@pytest.mark.parametrize(
    "choose",
    [
        lambda value: value == 0,
        lambda value: value != np.int64(0),
        lambda value: value in (0, 1),
        lambda value: value == np.array(0),
        lambda value: value != np.arange(2),
        lambda value: np.array(0) == value,
        lambda value: value == np.bool_(True),
    ],
)
def test_a_symbolic_value_is_not_compared_with_a_number(choose):
    assert refused(lambda: choose(RANK)).where == "expression rank"


@pytest.mark.parametrize("name", ["//", "%"])
def test_a_constant_is_not_divided_by_zero(name):
    seven = Graph("one", 1).let("seven", 7)
    error = refused(lambda: seven // 0 if name == "//" else seven % 0)
    assert (error.where, error.got) == (f"7 {name} 0", "0")


# ------------------------------------------------------------------ tensors, events


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
        ({"lane": "transfer", "cluster": 2}, "lane 'transfer', cluster 2"),
    ],
    ids=["lane", "cluster", "transfer"],
)
def test_lane_and_cluster_must_be_of_a_worker(fields, got):
    error = refused(lambda: function(**fields))
    assert error.what == "device function work cannot run on a worker"
    assert error.got.startswith(got)


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


@pytest.mark.parametrize("name", ["t", "rank", "stream", "self", "dims"])
def test_a_reserved_name_is_refused(name):
    g = Graph("one", 1)
    for claim in (
        lambda: g.dims(name),
        lambda: g.grid(**{name: 4}),
        lambda: g.input(name, (4,), "float32"),
    ):
        assert "reserved: dims, rank, self, stream, t, workers" in refused(claim).wanted


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


def test_values_are_for_parameters_of_the_body():
    error = refused(lambda: call_with_values({"rows": 2, "row": 3}))
    assert error.got == "row" and error.wanted == "keyword-only parameters: rows"
    assert "values= of call work has names" in str(error)


def test_values_are_dims_numbers_or_constants():
    n, i = Symbol("n", "dim"), Symbol("i", "coordinate")
    call_with_values({"rows": n})
    call_with_values({"rows": 3})
    for value, got in ((n + 1, "n + 1"), (i, "i"), (Symbol("m", "dim"), "m")):
        error = refused(lambda v=value: call_with_values({"rows": v}))
        assert error.got == got and "g.let(name, expression)" in error.fix


def test_values_have_32_bits():
    call_with_values({"rows": -(2**31)})
    error = refused(lambda: call_with_values({"rows": 2**31}))
    assert error.got == "rows=2147483648" and error.wanted == "integers of 32 bits"


def test_the_same_function_called_twice_needs_names():
    g = Graph("one", 1)
    g.call(function(), g.grid(i=1))
    error = refused(lambda: g.call(function(), g.grid(i=1)))
    assert error.what == "the name 'work' cannot be used"
    assert "name=..." in error.fix


def test_a_dtype_must_be_known():
    error = refused(lambda: Graph("one", 1).local("x", (4,), "float64"))
    assert error.what == "tensor x has an unknown dtype"
    assert error.wanted == "bfloat16, float16, float32, int32, float8_e4m3fn"


def test_an_order_returns_one_expression_for_each_axis():
    g = Graph("one", 1)
    error = refused(lambda: g.call(function(), g.grid(i=4), order=lambda t: (t, 0)))
    assert error.what == "order= does not return a coordinate of the grid"
    assert (error.where, error.got) == ("graph one, call work", "(t, 0)")


def test_a_call_needs_an_axis():
    g = Graph("one", 1)
    assert refused(lambda: g.call(function(), g.grid())).wanted.startswith("at least")


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
    ],
    ids=["region", "region's rank", "wait", "notify's rank", "order", "pace"],
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
    assert error.fix == "write to tensor.on(reader) in a task of the owner"


# -------------------------------------------------------------------- early reads


def test_reads_before_wait_are_for_the_tensor_lane():
    lane = {"lane": "transfer", "reads_before_wait": (0,)}
    error = refused(lambda: function(reads=1, **lane))
    assert error.wanted == "no reads_before_wait= on the transfer lane"


def test_a_task_without_waits_cannot_read_early():
    g = Graph("one", 1)
    x = g.input("x", (4,), "float32")
    error = refused(
        lambda: g.call(
            function(reads=1, reads_before_wait=(0,)), g.grid(i=1), reads=[x[:]]
        )
    )
    assert error.got == "0 waits, not loaded"


@pytest.mark.parametrize(
    ("after", "got"),
    [
        (1, "streams_after=1, 1 waits, 0 of them loaded, streams [0] of kinds ['input"),
        (0, "streams_after=0, 1 waits"),
    ],
)
def test_a_task_with_one_wait_cannot_stream_before_its_last_one(after, got):
    g = Graph("one", 1)
    x, e = g.input("x", (4,), "float32"), g.events("e", (1,), expects=1)
    streaming = function(reads=1, roles=("load", "compute"), streams=(0,))
    options = {"reads": [x[:]], "waits": [e[0]], "streams_after": after}
    error = refused(lambda: g.call(streaming, g.grid(i=1), **options))
    assert error.got.startswith(got)


@pytest.mark.parametrize("claim", ["let", "dims"])
def test_a_value_cannot_share_the_name_of_a_coordinate(claim):
    g = Graph("one", 1)
    g.grid(i=4)
    n = g.dims("n")
    error = refused(lambda: g.let("i", n + 1) if claim == "let" else g.dims("i"))
    assert error.what == "the name 'i' cannot be used"


def test_a_value_cannot_share_the_name_of_an_axis_of_events():
    g = Graph("one", 1)
    g.dims("done_0")
    error = refused(lambda: g.events("done", (4,), expects=lambda i: i))
    assert "'done_0'" in error.what


@pytest.mark.parametrize("name", ["local", "symmetric", "events"])
def test_a_shape_that_depends_on_the_rank_is_refused(name):
    g = Graph("one", 2)
    far = g.let("far", g.let("near", g.rank + 1) * 2)
    make, words = getattr(g, name), ("float32",) if name != "events" else ()
    keywords = {"expects": 1} if name == "events" else {}
    for extent in (g.rank, far):
        error = refused(lambda n=extent: make("x", (4, n), *words, **keywords))
        assert "depends on the rank" in error.what and error.got == str(extent)


def test_what_another_graph_has_is_refused():
    other, g = Graph("other", 1), Graph("one", 1)
    g.input("x", (g.dims("n"),), "float32"), g.events("e", (4,), expects=1)
    n = other.dims("n")
    x, e = other.input("x", (n + 3,), "float32"), other.events("e", (n,), expects=1)
    body, grid = function(reads=1), g.grid(i=4)
    error = refused(lambda: g.call(body, grid, reads=[x[:]], notifies=[e[0]]))
    assert (error.where, error.got) == ("graph one, call work", "x[:], e[0]")


def test_a_write_to_an_input_is_refused():
    g = Graph("one", 1)
    x = g.input("x", (4,), "float32")
    error = refused(lambda: g.call(function(writes=1), g.grid(i=1), writes=[x[:]]))
    assert error.what == "call work writes an input"


def test_names_that_are_not_ascii_are_refused():
    g = Graph("one", 1)
    for claim in (g.dims, lambda name: g.grid(**{name: 1})):
        assert refused(functools.partial(claim, "é")).got == "'é'"
    for changes in ({"constants": {"ké": 1}}, {"name": "é"}):
        error = refused(functools.partial(replace, function(), **changes))
        assert error.wanted == "ASCII identifiers without a leading underscore"


def test_a_number_of_ranks_is_a_positive_integer():
    @graph_function
    def graph(g):
        pass

    with pytest.raises(ArgumentError, match="world_size: an integer from 1 on"):
        graph(0)
    for value in (2.5, None):
        with pytest.raises(TypeError, match="world_size expects an int"):
            graph(value)


@pytest.mark.parametrize("make", ["let", "local", "events"])
def test_a_shared_number_of_unknown_symbols_is_refused(make):
    g = Graph("one", 1)
    g.dims("n")
    (i,) = g.grid(i=4)
    makes = {
        "let": lambda: g.let("m", i + 1),
        "local": lambda: g.local("l", (i,), "float32"),
        "events": lambda: g.events("e", (i,), expects=1),
    }
    error = refused(makes[make])
    assert error.what.endswith("uses unknown symbols")
    assert (error.wanted, error.got) == ("only n, rank", "i")


def test_the_name_of_a_constant_is_taken():
    g = Graph("one", 1)
    g.let("blocks", 4)
    for claim in (g.dims, lambda name: g.let(name, 3)):
        error = refused(functools.partial(claim, "blocks"))
        assert error.what == "the name 'blocks' cannot be used"


def test_a_graph_function_does_not_yield():
    with pytest.raises(TypeError, match=r"body would not run .* omit yield"):

        @graph_function
        def body(g: Graph) -> Any:
            yield g.grid(i=1)
