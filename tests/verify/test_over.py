"""Outputs that may be written over an input: every read comes before the write."""

from __future__ import annotations

from functools import partial

import pytest

from etc_dist.errors import RaceError
from etc_dist.schedule import schedule_static
from etc_dist.verify.verify import verify
from tests.graphs.kit import ROW, Kit, made
from tests.refusals import refused

DIMS = {"rows": 3, "n": 8}


def exchanged(g: Kit, is_over: bool, counts_own: bool) -> None:
    """y: the rows of x of the other rank. counts_own: y is written after all of this
    rank's rows are sent."""
    rows, n = g.dims("rows n")
    x = g.input("x", (rows, n), "float32")
    y = g.output("y", (rows, n), "float32", over=x if is_over else None)
    slots = g.symmetric("slots", (rows, n), "float32")
    send_events = g.events(
        "sent", (1,), expects=rows * (1 + counts_own), cross_rank=True
    )
    peer = (g.rank + 1) % 2
    own_event = [send_events.on(g.rank)[0]] if counts_own else []
    notifies = [send_events.on(peer)[0], *own_event]
    g.do(
        "send",
        rows,
        reads=[x[ROW, :]],
        writes=[slots.on(peer)[ROW, :]],
        notifies=notifies,
    )
    g.do(
        "copy", rows, reads=[slots[ROW, :]], writes=[y[ROW, :]], waits=[send_events[0]]
    )


@pytest.mark.parametrize("is_over, counts_own", [(False, False), (True, True)])
def test_an_output_over_an_input_is_proved(is_over, counts_own):
    graph = made(partial(exchanged, is_over=is_over, counts_own=counts_own), 2)
    assert "may be x" in graph.show() or not is_over
    verify(schedule_static(graph), DIMS, 4)


def test_a_write_over_rows_that_are_still_read_is_a_race():
    plan = schedule_static(made(partial(exchanged, is_over=True, counts_own=False), 2))
    words = "copy[i=0] on rank 0 writes|send[i=0] on rank 0 reads|x[0:1, 0:8]"
    refused(lambda: verify(plan, DIMS, 4), words, RaceError)


@pytest.mark.parametrize("kind", ["local", "input"])
def test_an_output_is_only_over_an_input_of_its_shape(kind):
    def copied(g: Kit) -> None:
        x = getattr(g, kind)("x", (8, 16), "float32")
        g.output("y", (8, 8 if kind == "input" else 16), "float32", over=x)

    refused(
        lambda: made(copied), f"wanted: an input of this graph|got: {kind} x [8, 16]"
    )
