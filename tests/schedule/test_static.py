"""How the tensor lane of a static plan assigns tasks whose work depends on data."""

from __future__ import annotations

from functools import partial

import pytest

from etc_dist.ir import span
from etc_dist.schedule import schedule_static
from tests.graphs.kit import ROW, Kit, made


def loading(g: Kit, even: bool) -> None:
    n, y = g.input("n", (4,), "int32"), g.output("y", (8,), "float32")
    g.do("touch", 4, writes=[y[span(2 * ROW, n.load(ROW))]], even=even)


@pytest.mark.parametrize(("even", "policy"), [(False, "ticket"), (True, "strided")])
def test_tasks_of_even_work_are_assigned_in_turn(even, policy):
    plan = schedule_static(made(partial(loading, even=even)))
    assert plan.lane("tensor").policy == policy
    assert ("  even\n" in plan.graph.show()) == even
