"""Conditional waits and notifications whose conditions do not fit each other."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from etc_dist.errors import DeadlockError, GraphError, RaceError
from etc_dist.schedule import SCHEDULES
from etc_dist.verify.verify import verify
from tests.graphs.kit import ROW, Kit, made
from tests.graphs.running_sums import running_sums

both = pytest.mark.parametrize("schedule", ["static", "dynamic"])
JOINS = np.array([0, 1, 1, 0, 1], np.int32)


def refused(error, kind, schedule, **options) -> str:
    plan = SCHEDULES[schedule](running_sums(1, kind=kind, **options))
    tensors = {"joins": [JOINS], "own": [JOINS]}
    with pytest.raises(error) as caught:
        verify(plan, {"n": 5}, 2, tensors)
    return caught.value.got


@both
@pytest.mark.parametrize("kind", ["dims", "local"])
def test_a_wait_without_its_condition_is_never_met(kind, schedule):
    got = refused(DeadlockError, kind, schedule, waits_when=False)
    assert "add_before[i=3] on rank 0 waits for summed[2] on rank 0; the wait" in got
    assert "(and" not in got


@both
@pytest.mark.parametrize("kind", ["dims", "local"])
def test_a_notification_without_its_condition_is_for_no_task(kind, schedule):
    got = refused(GraphError, kind, schedule, notifies_when=False)
    assert "summed[2] on rank 0 is notified 1 times, and no task waits for it" in got
    assert "(and 1 more like it)" in got


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


@pytest.mark.parametrize(
    ("holds", "error", "words"),
    [
        ("too often", GraphError, r"send\[i=0\] .*waits for ready\[-1\] .*outside of"),
        ("never", GraphError, r"ready\[0\] on rank 0 is notified 1 times, and no task"),
        ("reversed", GraphError, r"outside of"),
    ],
)
def test_a_condition_that_is_wrong_is_refused(holds, error, words):
    plan = SCHEDULES["static"](made(partial(neighbours, holds=holds)))
    with pytest.raises(error, match=words):
        verify(plan, {"n": 4}, 2)


def test_a_task_without_its_wait_races():
    """Task 0 reads the last row, for which it does not wait."""
    plan = SCHEDULES["static"](made(partial(neighbours, holds="right")))
    with pytest.raises(RaceError, match=r"make\[i=3\].* send\[i=0\].*no event orders"):
        verify(plan, {"n": 4}, 2)


def read_at_once(g: Kit, waits: bool) -> None:
    """z is read by other tasks than write it, and notify by loaded numbers."""
    at, z, ready = (
        g.input("at", (4,), "int32"),
        g.local("z", (4,), "float32"),
        g.event("ready", 4),
    )
    g.do("make", 4, writes=[z[ROW]], notifies=[ready[at.load(ROW)]])
    g.do("use", 4, reads=[z[ROW]], waits=[ready[ROW].when(waits)])


def test_a_wait_that_is_known_not_to_be_made_orders_nothing():
    verify(SCHEDULES["static"](made(partial(read_at_once, waits=True))), {}, 2)
    with pytest.raises(RaceError, match=r"make\[i=0\].* use\[i=0\].*no event orders"):
        verify(SCHEDULES["static"](made(partial(read_at_once, waits=False))), {}, 2)


def test_data_that_contradicts_conditions_is_found():
    plan = SCHEDULES["static"](running_sums(1, kind="input", waits_when=False))
    assert verify(plan, {"n": 5}, 2).unchecked != ()
    ones = np.array([0, 1, 1, 1, 1], np.int32)
    assert verify(plan, {"n": 5}, 2, {"joins": [ones]}).unchecked == ()
    with pytest.raises(DeadlockError, match=r"summed\[2\]"):
        verify(plan, {"n": 5}, 2, {"joins": [JOINS]})
