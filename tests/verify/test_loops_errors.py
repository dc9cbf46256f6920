"""Loops that are wrong in one turn: refused, with the turn."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from etc_dist.errors import DeadlockError, GraphError, RaceError
from etc_dist.ir import Expr, Graph, equal, select
from etc_dist.schedule import SCHEDULES
from etc_dist.verify.verify import verify
from tests.graphs.kit import made, touch
from tests.graphs.looped import dims_of, residual_layers
from tests.refusals import refused

LAYERS = 20
BOTH = pytest.mark.parametrize("schedule", ["static", "dynamic"])


def at_17(value: int, usual: Callable[[Expr], Expr]) -> Callable[[Expr], Expr]:
    """Of a layer: what is `usual`, but `value` in layer 17."""
    return lambda layer: select(equal(layer, 17), value, usual(layer))


# Options of residual_layers, and the error.
FAULTS = {
    "a wait for the turn before": (
        {"wait": at_17(16, lambda layer: layer)},
        GraphError,
        "no event orders them|ready[17] on rank 0 is notified 12 times, and no task|"
        "send[layer=17, d=0, r=0, k=0] on rank 0 writes hidden",
    ),
    "a buffer of the other parity": (
        {"buffer": at_17(0, lambda layer: layer % 2)},
        RaceError,
        "send[layer=16, d=0, r=0, k=0] on rank 0 writes hidden",
    ),
    "too many turns": (
        {"turns": 1},
        GraphError,
        "add_layer[layer=20, j=0] on rank 0 notifies computed[20, 0] on rank 0, "
        "outside of [20, 2]",
    ),
    "too few turns": (
        {"turns": -1},
        GraphError,
        "last|waits for ready[20]|make 0 ",
    ),
}


@BOTH
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_one_turn_is_found(name, schedule):
    options, kind, words = FAULTS[name]
    plan = SCHEDULES[schedule](residual_layers(2, **options))
    refused(lambda: verify(plan, dims_of(LAYERS, 2), 4), words, kind)


def in_loop(g: Graph, offset: int) -> None:
    """In each turn a waiter comes before the notifier of done[layer + 1]."""
    turn_events = g.events("done", (5,), expects=lambda layer: select(layer < 1, 0, 1))
    with g.loop(layer=4) as layer:
        waits = [turn_events[layer + offset]]
        g.call(touch(0, 0), g.grid(a=1), name="waiter", waits=waits)
        g.call(
            touch(0, 0), g.grid(b=1), name="notifier", notifies=[turn_events[layer + 1]]
        )
    if offset == 0:
        g.call(touch(0, 0), g.grid(c=1), name="end", waits=[turn_events[4]])


def test_a_task_may_wait_for_the_turn_before_but_not_for_a_later_task():
    before, later = (made(lambda g, n=n: in_loop(g, n)) for n in (0, 1))
    verify(SCHEDULES["static"](before), {}, 1)
    words = "8 tasks can never run|waiter[layer=0, a=0] on rank 0 waits for done[1]"
    refused(lambda: verify(SCHEDULES["static"](later), {}, 1), words, DeadlockError)
    verify(SCHEDULES["dynamic"](later), {}, 1)


def test_a_worker_takes_a_turn_after_the_other_without_events():
    def turns(g: Graph) -> None:
        x = g.local("x", (5, 4), "float32")
        with g.loop(layer=4) as layer:
            g.call(touch(0, 1), g.grid(a=1), name="w", writes=[x[layer, :]])
            g.call(touch(1, 0), g.grid(b=1), name="r", reads=[x[layer, :]])

    plan, words = (
        SCHEDULES["static"](made(turns)),
        "w[layer=0, a=0]|and r[layer=0, b=0]",
    )
    verify(plan, {}, 1)
    refused(lambda: verify(plan, {}, 2), words, RaceError)
