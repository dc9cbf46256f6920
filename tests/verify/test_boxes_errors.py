"""Faults of one access of many that are almost equal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from etc_dist.errors import RaceError
from etc_dist.ir import Graph, equal, select, span
from etc_dist.schedule import SCHEDULES
from etc_dist.verify import cells
from etc_dist.verify.verify import verify
from tests.graphs.decode_list import decode_list
from tests.graphs.kit import made, touch
from tests.refusals import refused


def one_race(body: Callable[[Graph], None], schedule: str, words: str) -> None:
    """The only race of a graph."""
    plan = SCHEDULES[schedule](made(body))
    error = refused(lambda: verify(plan, {}, 128), words, RaceError)
    assert "more like it" not in str(error)


BOTH = pytest.mark.parametrize("schedule", ["static", "dynamic"])


def in_place(g: Graph, swapped: int) -> None:
    """Task i updates x[i], but the last `swapped` ones write each other's element."""
    x = g.state("x", (8,), "float32")
    (i,) = grid = g.grid(i=8)
    target = select(i < 8 - swapped, i, 15 - swapped - i)
    g.call(touch(1, 1), grid, name="update", reads=[x[i]], writes=[x[target]])


@BOTH
def test_tasks_update_their_own_elements_alone(schedule):
    verify(SCHEDULES[schedule](made(lambda g: in_place(g, 0))), {}, 8)
    plan = SCHEDULES[schedule](made(lambda g: in_place(g, 2)))
    with pytest.raises(RaceError, match=r"update.i=6. .* update.i=7. .* x.7:8.*1 more"):
        verify(plan, {}, 8)


@BOTH
def test_one_reader_without_its_wait_is_a_race_among_many(schedule):
    def body(g: Graph) -> None:
        x = g.local("x", (64, 8), "float32")
        done = g.events("done", (2,), expects=lambda e: select(e < 1, 64, 0))
        (i,) = writers = g.grid(i=64)
        g.call(touch(0, 1), writers, name="w", writes=[x[i, :]], notifies=[done[0]])
        (j,) = readers = g.grid(j=64)
        waits = [done[select(j < 63, 0, 1)]]
        g.call(touch(1, 0), readers, name="r", reads=[x[j, :]], waits=waits)

    words = "w[i=63] on rank 0 writes and r[j=63] on rank 0 reads"
    one_race(body, schedule, words)


@BOTH
def test_one_reader_that_waits_for_some_writers_is_a_race_among_many(schedule):
    def body(g: Graph) -> None:
        x = g.local("x", (2,), "float32")
        done = g.events("done", (2,), expects=1)
        (i,) = writers = g.grid(i=2)
        g.call(touch(0, 1), writers, name="w", writes=[x[i]], notifies=[done[i]])
        (j,) = readers = g.grid(j=64)
        waits = [done[0], done[1].when(j < 63)]
        g.call(touch(1, 0), readers, name="r", reads=[x[:]], waits=waits)

    words = "w[i=1] on rank 0 writes and r[j=63] on rank 0 reads"
    one_race(body, schedule, words)


def test_one_early_read_without_an_earlier_wait_is_a_race_among_many():
    def body(g: Graph) -> None:
        x = g.local("x", (8,), "float32")
        done, first = (
            g.events(name, (n,), expects=1) for name, n in (("d", 1), ("f", 2))
        )
        mine = [done[0], first[0]]
        g.call(touch(0, 1), g.grid(a=1), name="w", writes=[x[:]], notifies=mine)
        g.call(touch(0, 0), g.grid(b=1), name="other", notifies=[first[1]])
        (j,) = grid = g.grid(j=64)
        waits = [first[select(j < 63, 0, 1)], done[0]]
        early = replace(touch(1, 0), reads_before_wait=(0,))
        g.call(early, grid, name="r", reads=[x[:]], waits=waits)

    words = "w[a=0] on rank 0 writes and r[j=63] on rank 0 reads"
    one_race(body, "static", words)


@BOTH
def test_a_fault_among_too_many_cells_is_named(schedule, monkeypatch):
    monkeypatch.setattr(cells, "MANY_CELLS", 200)
    monkeypatch.setattr(cells, "MOST_CELLS", 200)
    plan = SCHEDULES[schedule](decode_list(1, starts=False))
    with pytest.raises(RaceError, match=r"combine.*loads count.0:1.* no event orders"):
        verify(plan, {"requests": 8, "pages": 16}, 132)


def test_calls_with_the_same_waits_may_meet_them_at_different_times():
    def body(g: Graph) -> None:
        x = g.local("x", (8,), "float32")
        a, b = (g.events(name, (1,), expects=1) for name in "ab")
        g.call(touch(0, 0), g.grid(i=1), name="other", notifies=[a[0]])
        g.call(touch(0, 1), g.grid(i=1), name="w", writes=[x[:]], notifies=[b[0]])
        for name, early in (("late", ()), ("early", (0,))):
            reader = replace(touch(1, 0), name=name, reads_before_wait=early)
            g.call(reader, g.grid(i=1), reads=[x[:]], waits=[a[0], b[0]])

    words = "w[i=0] on rank 0 writes and early[i=0] on rank 0 reads early"
    one_race(body, "static", words)


@BOTH
def test_a_gather_after_the_turn_of_the_first_write_is_not_before_it(schedule):
    def body(g: Graph, reads: int) -> None:
        """Of four turns, the first ones gather from x; the third one writes it."""
        x = g.local("x", (8,), "float32")
        sent = g.events("sent", (2,), expects=lambda e: select(e < 1, 4, 0))
        gather = replace(touch(1, 0, "transfer"), gathers=(0,))
        with g.loop(layer=4) as layer:
            part = x[span(0, select(layer < reads, 8, 0))]
            g.call(gather, g.grid(a=1), name="r", reads=[part], notifies=[sent[0]])
            is_third = equal(layer, 2)
            part, wait = x[span(0, select(is_third, 8, 0))], select(is_third, 0, 1)
            g.call(
                touch(0, 1), g.grid(b=1), name="w", writes=[part], waits=[sent[wait]]
            )

    verify(SCHEDULES[schedule](made(lambda g: body(g, 2))), {}, 4)
    plan = SCHEDULES[schedule](made(lambda g: body(g, 4)))
    words = "r[layer=2, a=0] on rank 0 reads x[0:8] on rank 0 before w[layer=2, b=0]"
    refused(lambda: verify(plan, {}, 4), words)
