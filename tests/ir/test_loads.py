"""Loads of a call by phase, and their values."""

from __future__ import annotations

import numpy as np
import pytest

from etc_dist.ir import Call, device_function
from etc_dist.ir.call import waiting_loads, working_loads
from etc_dist.ir.expr import Const, Load, Symbol, substitute
from tests.graphs.calls import one_call, whole


@device_function(source="", reads=1, writes=1)
def work(x, y):
    y[...] = x


def routed(events: str = "events") -> Call:
    parts = f"""
        input at [4, 2] int32
        events ready [4] expects 1
        {events} many [i: 4] expects at.load(i, 1)
    """
    graph = one_call(
        1,
        work,
        ["x 4[span(0, at.load(0, 0))] float32"],
        ["y 4[span(i, 1)] float32"],
        parts=parts,
        grid="i: 4",
        waits=["many[i + 1]", "ready[i]", "ready[at.load(at.load(i, 0), 0)]"],
        notifies=["many[i]"],
    )
    return graph.calls[0]


def test_waits_without_loads_come_first():
    call = routed()
    assert [str(ref) for ref in call.free_waits] == ["ready[i]"]
    assert [str(ref) for ref in call.loaded_waits] == [
        "many[i + 1]",
        "ready[at[at[i, 0], 0]]",
    ]


def test_loads_are_sorted_by_phase():
    call = routed()
    assert [str(load) for load in waiting_loads(call)] == [
        "at[i + 1, 1]",
        "at[at[i, 0], 0]",
        "at[i, 0]",
    ]
    assert [str(load) for load in working_loads(call)] == ["at[0, 0]", "at[i, 1]"]
    assert call.is_loaded and not whole(1, function=work).calls[0].is_loaded


def test_a_notifier_does_not_load_a_cross_rank_count():
    call = routed("cross-rank events")
    assert [str(load) for load in working_loads(call)] == ["at[0, 0]"]


def test_an_expected_count_uses_the_index_of_the_element():
    (ref,) = routed().notifies
    assert str(ref.expects) == "at[i, 1]"
    i, n = Symbol("i", "coordinate"), Symbol("n", "dim")
    table = Load("table", (n,), (i * 2,))
    assert str(substitute(table + i, {"i": n + 1})) == "table[(n + 1) * 2] + (n + 1)"
    assert substitute(i * n, {"i": Const(0)}) == Const(0)


TABLE = np.array([3, 1, 2], np.int32)
I, N = Symbol("i", "coordinate"), Symbol("n", "dim")  # noqa: E741


@pytest.mark.parametrize("i", [2, np.array([0, 2, 1])], ids=["number", "array"])
def test_a_load_gives_numbers_that_do_not_wrap(i):
    numbers = Load("table", (N,), (I,)).evaluate({"i": i, "@table": TABLE})
    assert np.array_equal(numbers * 2**31, TABLE[i].astype(np.int64) * 2**31)


@pytest.mark.parametrize(
    ("i", "first"), [(-1, -1), (3, 3), (np.array([0, 1, -2, 7]), -2)]
)
def test_a_load_from_beyond_the_tensor_is_an_index_error(i, first):
    with pytest.raises(IndexError) as caught:
        Load("table", (N,), (I,)).evaluate({"i": i, "@table": TABLE})
    assert str(caught.value) == f"table[i]: index {first} is outside of [0, 3)"
