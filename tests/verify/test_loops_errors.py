"""Loops that are wrong in one turn: refused, with the turn."""

from __future__ import annotations

import pytest

from etc_dist.errors import DeadlockError, GraphError, RaceError
from etc_dist.ir import Expr, Graph, equal, select
from etc_dist.schedule import SCHEDULES
from etc_dist.verify.verify import verify
from tests.graphs.kit import made, touch
from tests.graphs.looped import dims_of, residual_layers

LAYERS = 20
BOTH = pytest.mark.parametrize("schedule", ["static", "dynamic"])


@BOTH
def test_a_wait_for_the_turn_before_is_a_race_of_that_turn(schedule):
    def wait(layer: Expr) -> Expr:
        return select(equal(layer, 17), 16, layer)

    plan = SCHEDULES[schedule](residual_layers(2, wait=wait))
    with pytest.raises(GraphError, match="no event orders them") as caught:
        verify(plan, dims_of(LAYERS, 2), 4)
    assert "ready[17] on rank 0 is notified 12 times, and no task" in caught.value.got
    assert "send[layer=17, d=0, r=0, k=0] on rank 0 writes hidden" in caught.value.got


@BOTH
def test_a_buffer_of_the_other_parity_is_a_race_of_that_turn(schedule):
    def buffer(layer: Expr) -> Expr:
        return select(equal(layer, 17), 0, layer % 2)

    plan = SCHEDULES[schedule](residual_layers(2, buffer=buffer))
    with pytest.raises(RaceError) as caught:
        verify(plan, dims_of(LAYERS, 2), 4)
    assert "send[layer=16, d=0, r=0, k=0] on rank 0 writes hidden" in caught.value.got


@BOTH
def test_too_many_turns_are_out_of_range(schedule):
    plan = SCHEDULES[schedule](residual_layers(2, turns=1))
    with pytest.raises(GraphError) as caught:
        verify(plan, dims_of(LAYERS, 2), 4)
    outside = "add_layer[layer=20, j=0] on rank 0 notifies computed[20, 0] on rank 0, o"
    assert outside + "utside of [20, 2]" in caught.value.got


@BOTH
def test_too_few_turns_leave_a_wait_unmet(schedule):
    plan = SCHEDULES[schedule](residual_layers(2, turns=-1))
    with pytest.raises(GraphError, match=r"last.* waits for ready\[20\].* make 0 "):
        verify(plan, dims_of(LAYERS, 2), 4)


def in_loop(g: Graph, offset: int) -> None:
    """In each turn a waiter comes before the notifier of done[layer + 1]."""
    done = g.events("done", (5,), expects=lambda layer: select(layer < 1, 0, 1))
    with g.loop(layer=4) as layer:
        waits = [done[layer + offset]]
        g.call(touch(0, 0), g.grid(a=1), name="waiter", waits=waits)
        g.call(touch(0, 0), g.grid(b=1), name="notifier", notifies=[done[layer + 1]])
    if offset == 0:
        g.call(touch(0, 0), g.grid(c=1), name="end", waits=[done[4]])


def test_a_task_may_wait_for_the_turn_before_but_not_for_a_later_task():
    before, later = (made(lambda g, n=n: in_loop(g, n)) for n in (0, 1))
    verify(SCHEDULES["static"](before), {}, 1)
    with pytest.raises(DeadlockError, match="8 tasks can never run") as caught:
        verify(SCHEDULES["static"](later), {}, 1)
    assert "waiter[layer=0, a=0] on rank 0 waits for done[1]" in caught.value.got
    verify(SCHEDULES["dynamic"](later), {}, 1)


def test_a_worker_takes_a_turn_after_the_other_without_events():
    def turns(g: Graph) -> None:
        x = g.local("x", (5, 4), "float32")
        with g.loop(layer=4) as layer:
            g.call(touch(0, 1), g.grid(a=1), name="w", writes=[x[layer, :]])
            g.call(touch(1, 0), g.grid(b=1), name="r", reads=[x[layer, :]])

    verify(SCHEDULES["static"](made(turns)), {}, 1)
    with pytest.raises(RaceError, match=r"w\[layer=0, a=0\].* and r\[layer=0, b=0\]"):
        verify(SCHEDULES["static"](made(turns)), {}, 2)
