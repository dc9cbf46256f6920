"""Faults of one access of many that are almost equal."""

from __future__ import annotations

import pytest

from etc_dist.errors import RaceError
from etc_dist.ir import equal, select, span
from etc_dist.schedule import SCHEDULES
from etc_dist.verify import cells
from etc_dist.verify.verify import verify
from tests.graphs.decode_list import decode_list
from tests.graphs.kit import ROW, Kit, made
from tests.refusals import refused

BOTH = pytest.mark.parametrize("schedule", ["static", "dynamic"])


def in_place(g: Kit, swapped: int) -> None:
    """Task i updates x[i], but the last `swapped` ones write each other's element."""
    x, target = g.x(8, kind="state"), select(8 - swapped > ROW, ROW, 15 - swapped - ROW)
    g.do("update", 8, reads=[x[ROW]], writes=[x[target]])


@BOTH
def test_tasks_update_their_own_elements_alone(schedule):
    verify(SCHEDULES[schedule](made(lambda g: in_place(g, 0))), {}, 8)
    plan = SCHEDULES[schedule](made(lambda g: in_place(g, 2)))
    with pytest.raises(RaceError, match=r"update.i=6. .* update.i=7. .* x.7:8.*1 more"):
        verify(plan, {}, 8)


def without_its_wait(g: Kit) -> None:
    x, end_event = (
        g.x(64, 8),
        g.event("done", 2, expects=lambda e: select(e < 1, 64, 0)),
    )
    g.do("w", 64, writes=[x[ROW, :]], notifies=[end_event[0]])
    g.do("r", 64, reads=[x[ROW, :]], waits=[end_event[select(ROW < 63, 0, 1)]])


def waits_for_some(g: Kit) -> None:
    x, end_event = g.x(2), g.event("done", 2)
    g.do("w", 2, writes=[x[ROW]], notifies=[end_event[ROW]])
    g.do("r", 64, reads=[x[:]], waits=[end_event[0], end_event[1].when(ROW < 63)])


def early_without_a_wait(g: Kit) -> None:
    x, end_event, first = g.x(8)[:], g.event("d")[0], g.event("f", 2)
    g.do("w", writes=[x], notifies=[end_event, first[0]])
    g.do("other", notifies=[first[1]])
    waits = [first[select(ROW < 63, 0, 1)], end_event]
    g.do("r", 64, reads=[x], waits=waits, reads_before_wait=(0,))


def met_at_other_times(g: Kit) -> None:
    """Calls with the same waits, of which one reads early."""
    x, a, b = g.x(8)[:], g.event("a")[0], g.event("b")[0]
    g.do("other", notifies=[a])
    g.do("w", writes=[x], notifies=[b])
    g.do("late", reads=[x], waits=[a, b])
    g.do("early", reads=[x], waits=[a, b], reads_before_wait=(0,))


# What one of many readers lacks, the race, and the schedules that have it.
RACES = {
    "its wait": (without_its_wait, "w[i=63]|r[i=63] on rank 0 reads", SCHEDULES),
    "one wait": (waits_for_some, "w[i=1]|r[i=63] on rank 0 reads", SCHEDULES),
    "an early wait": (
        early_without_a_wait,
        "w[i=0]|r[i=63] on rank 0 reads",
        ["static"],
    ),
    "its time": (
        met_at_other_times,
        "w[i=0]|early[i=0] on rank 0 reads early",
        ["static"],
    ),
}


@pytest.mark.parametrize("name", RACES)
def test_one_reader_of_many_is_the_only_race(name):
    act, words, schedules = RACES[name]
    for schedule in {*schedules} - {"auto"}:
        plan = SCHEDULES[schedule](made(act))
        error = refused(lambda: verify(plan, {}, 128), words, RaceError)  # noqa: B023
        assert "more like it" not in str(error)


@BOTH
def test_a_fault_among_too_many_cells_is_named(schedule, monkeypatch):
    monkeypatch.setattr(cells, "MANY_CELLS", 200)
    monkeypatch.setattr(cells, "MOST_CELLS", 200)
    plan = SCHEDULES[schedule](decode_list(1, starts=False))
    with pytest.raises(RaceError, match=r"combine.*loads count.0:1.* no event orders"):
        verify(plan, {"requests": 8, "pages": 16}, 132)


@BOTH
def test_a_gather_after_the_turn_of_the_first_write_is_not_before_it(schedule):
    def body(g: Kit, reads: int) -> None:
        """Of four turns, the first ones gather from x; the third one writes it."""
        x = g.local("x", (8,), "float32")
        read_events = g.events("sent", (2,), expects=lambda e: select(e < 1, 4, 0))
        with g.loop(layer=4) as layer:
            part = x[span(0, select(layer < reads, 8, 0))]
            on_transfer = {"lane": "transfer", "gathers": (0,)}
            g.do(
                "r", g.grid(a=1), reads=[part], notifies=[read_events[0]], **on_transfer
            )
            is_third = equal(layer, 2)
            part, wait = x[span(0, select(is_third, 8, 0))], select(is_third, 0, 1)
            g.do("w", g.grid(b=1), writes=[part], waits=[read_events[wait]])

    verify(SCHEDULES[schedule](made(lambda g: body(g, 2))), {}, 4)
    plan = SCHEDULES[schedule](made(lambda g: body(g, 4)))
    words = "r[layer=2, a=0] on rank 0 reads x[0:8] on rank 0 before w[layer=2, b=0]"
    refused(lambda: verify(plan, {}, 4), words)
