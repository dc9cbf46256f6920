"""Range checks of loaded values on the device: the same as on the host."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etc_dist.codegen import generate
from etc_dist.codegen.bounds import Condition, conjunction, in_range, waits_in_range
from etc_dist.codegen.names import tensor_function
from etc_dist.errors import ArgumentError
from etc_dist.ir import Call, GraphFunction, select, tile
from etc_dist.runtime.cpu.task import Resolver, Task, TaskBlock
from etc_dist.schedule import schedule_static
from tests.codegen.as_python import as_python
from tests.graphs.kit import ROW, Kit, made
from tests.graphs.permute import permute
from tests.graphs.written import GRAPHS, scattered

WORLD, ROWS = 2, 3


def call_of(graph: GraphFunction, name: str) -> Call:
    return next(call for call in graph.calls if call.name == name)


def test_references_without_loads_need_no_check():
    for name in ("matmul_reduce_scatter", "all_gather_matmul"):
        source = generate(schedule_static(GRAPHS[name])).text
        assert "kLoads = 1" not in source
        assert "in_range" not in source


def test_a_loaded_wait_comes_after_the_others_and_is_checked():
    source = generate(schedule_static(scattered(WORLD))).text
    for line in (
        "kWaits = 2, kFreeWaits = 1, ",
        "kLoads = 1",
        "if (n == 0) return event_free(g, c.axis_i).expects(1);",
        "return event_counted(g, loaded<0>(g, c) - 1, minimum(c.axis_i, 1)).expects(",
        "ETC_ROW(0) tensor_table(g).load(c.axis_i);",
    ):
        assert line in source
    count = "tensor_table(g).load(tensor_table(g).load(c.axis_i) - 1)"
    assert list(waits_in_range(call_of(scattered(WORLD), "scatter"))) == [
        ("is_below(c.axis_i, g.dim_n)", 0),
        ("is_below(i64(tensor_table(g).load(c.axis_i)) - 1, g.dim_n)", 1),
        ("is_below(minimum(c.axis_i, 1), 2)", 0),
        (f"fits_i32(i64({count}) + minimum(c.axis_i, 1))", 2),
    ]


def test_a_product_of_loads_does_not_wrap():
    def tiled(g: Kit) -> None:
        at = g.input("at", (4,), "int32")
        g.do("f", reads=[g.input("x", (4096,), "float32")[tile(at.load(0), 1024)]])

    call = call_of(made(tiled), "f")
    assert list(in_range(call, 1)) == [
        ("is_at_most(i64(tensor_at(g).load(0)) * 1024, 4096)", 1)
    ]
    assert device_says(call, 0, {"at": np.array([4])})
    assert not device_says(call, 0, {"at": np.array([2**22])})


def test_results_within_an_expression_are_checked_before_their_use():
    def hashed(g: Kit) -> None:
        m = g.dims("m")
        at, x = g.input("at", (4,), "int32"), g.input("x", (m,), "float32")
        g.do("f", reads=[x[tile(at.load(0) * 65537 % m, 1)]])

    product = "tensor_at(g).load(0)"
    assert list(in_range(call_of(made(hashed), "f"), 1)) == [
        (f"fits_i32(i64({product}) * 65537)", 1),
        (f"is_at_most(i64(floormod({product} * 65537, g.dim_m)), g.dim_m)", 2),
    ]


def test_a_value_is_loaded_once_for_both_bounds():
    move = call_of(permute(1), "move_row")
    assert list(in_range(move, 1)) == [
        ("is_below(c.axis_i, g.dim_n)", 0),
        ("is_at_most(tensor_place(g).load(c.axis_i), g.dim_n)", 1),
        ("is_below(tensor_expert(g).load(c.axis_i), 4)", 1),
    ]


def test_conditions_with_dependent_loads_are_evaluated_last():
    conditions = [Condition("a", 1), Condition("b", 0), Condition("c", 1)]
    assert conjunction(conditions) == "b && a & c"
    assert conjunction([]) == ""
    bounds = in_range(call_of(scattered(WORLD), "scatter"), WORLD)
    assert {c.text.count(".load(") for c in bounds if c.depth == 2} == {2}


# ---------------------------------------------------------------- host and device agree


def tensor_of(array: Any) -> Any:
    """The function of a tensor."""

    def load(*index: int) -> int:
        inside = (0 <= i < n for i, n in zip(index, array.shape, strict=True))
        assert all(inside), "a load from beyond the tensor, unchecked"
        return int(array[index])

    return lambda g: SimpleNamespace(load=load)


DEVICE = {
    "i64": lambda value: value,
    "is_below": lambda value, extent: 0 <= value < extent,
    "is_at_most": lambda value, extent: 0 <= value <= extent,
    "fits_i32": lambda value: -(2**31) <= value < 2**31,
    "floordiv": lambda a, b: a // b,
    "minimum": min,
}


def device_says(call: Call, i: int, tensors: dict[str, Any]) -> bool:
    loads = {tensor_function(name): tensor_of(a) for name, a in tensors.items()}
    g = SimpleNamespace(dim_n=ROWS, rank=0)
    names = {**DEVICE, **loads, "g": g, "c": SimpleNamespace(axis_i=i)}
    conditions = [*waits_in_range(call), *in_range(call, WORLD)]
    # In stages: the conditions of one depth need those of smaller depth.
    conditions = sorted(conditions, key=lambda condition: condition.depth)
    return all(eval(as_python(condition.text), names) for condition in conditions)


def host_says(
    graph: GraphFunction, call: Call, i: int, tensors: dict[str, Any]
) -> bool:
    env = graph.environment({"n": ROWS}, 0)
    env |= {f"@{name}": array for name, array in tensors.items()}
    resolver = Resolver(0, graph, env)
    task = Task(0, 0, "tensor", call, i, 1, TaskBlock(call, i, 1, env))
    try:
        resolver.accesses((*call.reads, *call.writes), task)
        resolver.waits((*call.waits, *call.notifies), task)
    except ArgumentError:
        return False
    return True


many = settings(max_examples=25 * settings().max_examples)
VALUES = st.integers(-1, 4) | st.sampled_from([-(2**31), 2**31 - 5])


def chosen(g: Kit) -> None:
    """Loads, divisors and products of loads that only one choice of `select` has."""
    n = g.dims("n")
    at, table = g.input("at", (n, 2), "int32"), g.input("table", (n,), "int32")
    x = g.input("x", (n,), "float32")
    i, key = ROW, table.load(ROW)
    start = select(key < n, table.load(key), n // at.load(i, 0))
    wide = select(at.load(i, 1) < 2, at.load(i, 1) * 3 // 4, select(key < 0, key, 0))
    g.do("f", n, reads=[x[tile(start, 1)], x[tile(wide, 1)]])


def conditional(g: Kit) -> None:
    """Waits and notifications by loaded conditions, with loads, divisors and ranks that
    are in range only where these hold."""
    n = g.dims("n")
    at, table = g.input("at", (n, 2), "int32"), g.input("table", (n,), "int32")
    free = g.events("free", (n,), expects=1)
    count_event = g.events("counted", (n, 2), expects=lambda i, j: table.load(i) // j)
    here = g.events("here", (n,), expects=1, cross_rank=True)
    i, key, side = ROW, table.load(ROW), at.load(ROW, 1)
    wait = count_event[table.load(key), side].when(key < n).when(6 // key)
    notify = here.on(side)[i - key].when(at.load(i, 0))
    g.do("f", n, waits=[free[i - 1].when(key), wait], notifies=[notify])


@pytest.mark.parametrize(
    "graph",
    [scattered(WORLD), made(chosen, WORLD), made(conditional, WORLD)],
    ids=["loads", "choices", "conditions"],
)
@many
@given(
    at=st.lists(VALUES, min_size=2 * ROWS, max_size=2 * ROWS),
    table=st.lists(VALUES, min_size=ROWS, max_size=ROWS),
    i=st.integers(0, ROWS - 1),
)
def test_device_and_host_refuse_the_same_values(graph, at, table, i):
    """Also where a choice or a condition leaves some out."""
    (call,) = graph.calls
    tensors = {"at": np.array(at).reshape(ROWS, 2), "table": np.array(table)}
    assert device_says(call, i, tensors) == host_says(graph, call, i, tensors)


@pytest.mark.parametrize(("at", "fits"), [(0, True), (1, True), (2, False)])
def test_loaded_ranks_are_below_the_world_size(at, fits):
    graph = scattered(WORLD)
    tensors = {"at": np.array([[0, at]] * ROWS), "table": np.ones(ROWS, np.int64)}
    assert device_says(call_of(graph, "scatter"), 0, tensors) is fits
