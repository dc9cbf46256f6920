"""Conditional waits and notifications whose conditions do not fit each other."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from etc_dist.errors import DeadlockError, GraphError, RaceError
from etc_dist.ir import GraphFunction
from etc_dist.schedule import SCHEDULES
from etc_dist.verify.verify import verify
from tests.graphs.kit import ROW, Kit, made
from tests.graphs.running_sums import running_sums
from tests.refusals import refused

JOINS = np.array([0, 1, 1, 0, 1], np.int32)
SUMS = {"joins": [JOINS], "own": [JOINS]}


def neighbours(g: Kit, holds: str) -> None:
    """y[i] = z[i - 1] for i > 0, which task i - 1 has written."""
    n = g.dims("n")
    z, i, ready = g.x(n, 4), ROW, g.event("ready", n)
    condition = {
        "right": i > 0,
        "too often": i >= 0,
        "never": False,
        "reversed": n - 1 - i,
    }[holds]
    g.do("make", n, writes=[z[i, :]], notifies=[ready[i].when(i < n - 1)])
    waits = [ready[i - 1].when(condition)]
    g.do("send", n, reads=[z[(i + n - 1) % n, :]], waits=waits)


def read_at_once(g: Kit, waits: bool) -> None:
    """z is read by other tasks than write it, and notify by loaded numbers."""
    at, z, ready = (
        g.input("at", (4,), "int32"),
        g.local("z", (4,), "float32"),
        g.event("ready", 4),
    )
    g.do("make", 4, writes=[z[ROW]], notifies=[ready[at.load(ROW)]])
    g.do("use", 4, reads=[z[ROW]], waits=[ready[ROW].when(waits)])


def holding(holds: str) -> GraphFunction:
    return made(partial(neighbours, holds=holds))


# The graph, its dims and tensors, and the error.
FAULTS: dict[str, tuple[Any, ...]] = {
    **{
        f"wait for all, {kind}": (
            running_sums(1, kind=kind, waits_when=False),
            ({"n": 5}, SUMS),
            DeadlockError,
            "add_before[i=3] on rank 0 waits for summed[2] on rank 0; the wait",
        )
        for kind in ("dims", "local")
    },
    **{
        f"notification of all, {kind}": (
            running_sums(1, kind=kind, notifies_when=False),
            ({"n": 5}, SUMS),
            GraphError,
            "summed[2] on rank 0 is notified 1 times, and no task waits for it|"
            "(and 1 more like it)",
        )
        for kind in ("dims", "local")
    },
    "too often": (
        holding("too often"),
        ({"n": 4},),
        GraphError,
        "send[i=0]|waits for ready[-1]|outside of",
    ),
    "never": (
        holding("never"),
        ({"n": 4},),
        GraphError,
        "ready[0] on rank 0 is notified 1 times, and no task",
    ),
    "reversed": (holding("reversed"), ({"n": 4},), GraphError, "outside of"),
    "a row without a wait": (  # task 0 reads the last row, for which it does not wait
        holding("right"),
        ({"n": 4},),
        RaceError,
        "make[i=3]|send[i=0]|no event orders",
    ),
    "not waited for": (
        made(partial(read_at_once, waits=False)),
        ({},),
        RaceError,
        "make[i=0]|use[i=0]|no event orders",
    ),
    "contradicted by data": (
        running_sums(1, kind="input", waits_when=False),
        ({"n": 5}, {"joins": [JOINS]}),
        DeadlockError,
        "summed[2]",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_wrong_condition_is_refused(name):
    graph, (dims, *tensors), kind, words = FAULTS[name]
    for schedule in ("static", "dynamic") if "all, " in name else ("static",):
        plan = SCHEDULES[schedule](graph)
        error = refused(lambda: verify(plan, dims, 2, *tensors), words, kind)  # noqa: B023
        assert "wait for all" not in name or "(and" not in str(error)


def test_a_wait_that_is_known_to_be_made_orders_what_follows():
    verify(SCHEDULES["static"](made(partial(read_at_once, waits=True))), {}, 2)


def test_data_that_fits_conditions_leaves_nothing_unchecked():
    plan = SCHEDULES["static"](running_sums(1, kind="input", waits_when=False))
    assert verify(plan, {"n": 5}, 2).unchecked != ()
    ones = np.array([0, 1, 1, 1, 1], np.int32)
    assert verify(plan, {"n": 5}, 2, {"joins": [ones]}).unchecked == ()
