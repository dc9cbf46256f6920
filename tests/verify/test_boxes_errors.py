"""Faults of one access of many that are almost equal."""

from __future__ import annotations

import pytest

from etc_dist.errors import RaceError
from etc_dist.ir import Graph, select
from etc_dist.schedule import SCHEDULES
from etc_dist.verify import cells
from etc_dist.verify.verify import verify
from tests.verify.test_verify import build, touch
from tests.verify.work_list import decode_list

BOTH = pytest.mark.parametrize("schedule", ["static", "dynamic"])


def in_place(g: Graph, swapped: int) -> None:
    """Task i updates x[i], but the last `swapped` ones write each other's element."""
    x = g.state("x", (8,), "float32")
    (i,) = grid = g.grid(i=8)
    target = select(i < 8 - swapped, i, 15 - swapped - i)
    g.call(touch(1, 1), grid, name="update", reads=[x[i]], writes=[x[target]])


@BOTH
def test_tasks_update_their_own_elements_alone(schedule):
    verify(SCHEDULES[schedule](build(lambda g: in_place(g, 0))), {}, 8)
    plan = SCHEDULES[schedule](build(lambda g: in_place(g, 2)))
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

    with pytest.raises(RaceError) as caught:
        verify(SCHEDULES[schedule](build(body)), {}, 128)
    assert "w[i=63] on rank 0 writes and r[j=63] on rank 0 reads" in caught.value.got
    assert "more like it" not in caught.value.got


@BOTH
def test_a_fault_among_too_many_cells_is_named(schedule, monkeypatch):
    monkeypatch.setattr(cells, "MANY_CELLS", 200)
    monkeypatch.setattr(cells, "MOST_CELLS", 200)
    plan = SCHEDULES[schedule](decode_list(1, starts=False))
    with pytest.raises(RaceError, match=r"combine.*loads count.0:1.* no event orders"):
        verify(plan, {"requests": 8, "pages": 16}, 132)
