"""How the tensor lane of a static plan assigns tasks whose work depends on data."""

from __future__ import annotations

import pytest

from etc_dist.ir import DeviceFunction, Graph, graph_function, span
from etc_dist.schedule import schedule_static

COPY = DeviceFunction("f", print, "f.cuh", "tensor", 1, 1)


@graph_function
def loading(g: Graph, *, even: bool) -> None:
    x, n = g.input("x", (8,), "float32"), g.input("n", (4,), "int32")
    y = g.output("y", (8,), "float32")
    (i,) = grid = g.grid(i=4)
    own = span(2 * i, n.load(i))
    g.call(COPY, grid, reads=[x[own]], writes=[y[own]], even=even)


@pytest.mark.parametrize(("even", "policy"), [(False, "ticket"), (True, "strided")])
def test_tasks_of_even_work_are_assigned_in_turn(even, policy):
    plan = schedule_static(loading(1, even=even))
    assert plan.lane("tensor").policy == policy
    assert ("  even\n" in plan.graph.show()) == even
