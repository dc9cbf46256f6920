"""Refusals of states: races, and arrays that cannot be updated in place."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from etc_dist.errors import ArgumentError, GraphError, RaceError
from etc_dist.functions.push_rows import push_rows
from etc_dist.ir import Graph
from etc_dist.runtime.array_checks import Expected, check_arrays
from etc_dist.runtime.arrays import inspect
from etc_dist.schedule import schedule_static
from etc_dist.verify.verify import verify
from tests.graphs.accumulate import WIDTH, accumulate, arrays
from tests.graphs.calls import one_call
from tests.graphs.kit import ROW, Kit, made
from tests.ops.arrays import Arrays

DIMS = {"n": 4, "rows": 6}


def twice(g: Kit, is_ordered: bool) -> None:
    """Two calls that write the same state."""
    state, end_event = (
        g.state("kept", (4, WIDTH), "float32")[ROW, :],
        g.event("done", 4),
    )
    call, events = (
        {"lane": "transfer", "writes": [state]},
        [end_event[ROW]] if is_ordered else [],
    )
    g.do("a", 4, **call, notifies=events)
    g.do("b", 4, **call, waits=events)


def test_two_writes_need_an_order():
    verify(schedule_static(made(partial(twice, is_ordered=True))), {}, 4)
    with pytest.raises(RaceError, match=r"a\[i=0\].*and b\[i=0\].* writes kept\[0:1"):
        verify(schedule_static(made(partial(twice, is_ordered=False))), {}, 4)


def test_a_read_and_a_write_need_an_order():
    tensors = {"place": [arrays()["place"]]}
    plan = schedule_static(accumulate(1, waits=False))
    with pytest.raises(
        RaceError, match=r"add_to_row.*writes and push_rows.*reads total"
    ):
        verify(plan, DIMS, 3, tensors)


def test_a_loaded_state_is_not_written():
    def moves(g: Graph) -> None:
        at = g.state("at", (4,), "int32")
        g.call(push_rows(), g.grid(i=1), reads=[at[at.load(0)]], writes=[at[1]])

    with pytest.raises(GraphError, match="state at is written, and index") as caught:
        made(moves)
    assert caught.value.where == "graph body, call push_rows writes at[1]"
    assert "give that as at in the next run" in caught.value.fix


class ReadOnly:
    """An array of another library on a GPU, which must not be written."""

    def __init__(self, array: Any):
        interface = array.__cuda_array_interface__
        place = interface["data"][0], True
        self.__cuda_array_interface__ = {**interface, "data": place}


def read_only(total: Any) -> Any:
    if not isinstance(total, np.ndarray):
        return ReadOnly(total)
    total = total.copy()
    total.flags.writeable = False
    return total


CHANGES: dict[str, tuple[Callable[[Any], dict[str, Any]], str]] = {
    "missing": (
        lambda total: {"total": None},
        r"wanted: inputs x; states total, place; .*\n.*missing \['total'\]",
    ),
    "read-only": (
        lambda total: {"total": read_only(total)},
        "wanted: .*total that can be written\n",
    ),
    "other dtype": (
        lambda total: {"total": total.astype(np.float16)},
        r"got: .*total \[6, 8\] float16",
    ),
    "not contiguous": (
        lambda total: {"total": total.repeat(2, axis=1)[:, ::2]},
        "got: .*, not contiguous",
    ),
    "transposed": (lambda total: {"total": total.T.copy().T}, "got: .*, transposed"),
    "over an input": (
        lambda total: {"x": total[:4], "total": total},
        "wanted: .*total apart from x\n +got: +.*total overlaps x",
    ),
}


@pytest.mark.mpi
@pytest.mark.parametrize("what", CHANGES)
def test_an_array_that_cannot_be_updated_is_refused_on_all_ranks(
    what, world, make_program
):
    program, backend = make_program(accumulate(world.size)), Arrays(world.backend)
    operands = {name: backend.put(array) for name, array in arrays().items()}
    change, words = CHANGES[what]
    is_wrong = world.rank == world.size - 1
    wrong = {**operands, **change(operands["total"])} if is_wrong else operands
    with pytest.raises(ArgumentError) as caught:
        program.run(**{n: a for n, a in wrong.items() if a is not None})
    assert re.search(words, str(caught.value))
    program.run(**operands)
    program.synchronize()


def test_two_states_do_not_overlap(make_program, world):
    axes, kinds = f"n {WIDTH} float32", {"a": "state", "b": "state"}
    operands = [f"a {axes}"], [f"b {axes}"]
    graph = one_call(world.size, push_rows(), *operands, kinds=kinds)
    array = Arrays(world.backend).poisoned((4, WIDTH), "float32")
    with pytest.raises(ArgumentError, match="b overlaps a"):
        make_program(graph).run(a=array, b=array)


def test_an_array_of_another_library_may_be_read_only(monkeypatch):
    owner = SimpleNamespace(__cuda_array_interface__={"data": (256, True)})
    place = {"data": SimpleNamespace(ptr=256), "device": SimpleNamespace(id=0)}
    shape = {"shape": (4,), "strides": (4,), "itemsize": 4, "dtype": "float32"}
    array = SimpleNamespace(**place, **shape)
    monkeypatch.setattr("etc_dist.runtime.arrays._as_cupy", lambda name, value: array)
    argument = Expected("x", (4,), "float32", is_written=True)
    with pytest.raises(ArgumentError, match="wanted: x that can be written"):
        check_arrays("f", [argument], {"x": inspect("x", owner)}, 0)
