"""Flagged tensors: proofs, and planted faults."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from etc_dist.errors import RaceError, ScheduleError
from etc_dist.functions.flags import add_flagged, push_flagged
from etc_dist.functions.push_rows import push_rows
from etc_dist.ir import GraphFunction
from etc_dist.schedule import schedule_dynamic, schedule_static
from etc_dist.verify.verify import verify
from tests.graphs.flagged import flagged_sum
from tests.graphs.kit import Kit, made
from tests.refusals import refused

DIMS = {"vectors": 2}
EXCHANGED = flagged_sum(2, pieces=2)
"""In two pieces."""


def prove(graph: GraphFunction) -> None:
    verify(schedule_static(graph), DIMS, 4)


def test_flagged_words_are_proved():
    prove(EXCHANGED)
    assert "carried by words" in EXCHANGED.show()


FAULTS = {
    "another event": (
        {"waits_for": 1},
        "add_flagged[i=0, s=0] on rank 0 reads words[1:2, 0:16] on rank 0|waits "
        "for no event of the tensor that push[i=0, s=0] on rank 1 notifies",
    ),
    "two writers": (
        {"twice": True},
        "words[1:2, 0:16] on rank 0 is written by push[i=0, s=0] on rank 1 and by "
        "again[i=0, s=0] on rank 1",
    ),
    "unread words": (
        {"reads": 1},
        "push[i=1, s=0] on rank 1 writes words[1:2, 16:32] on rank 0, which no "
        "task reads",
    ),
    "no answer": ({"answers": False}, "rank 0 waits for no task of rank 1 in this run"),
    "other data": (
        {"by_flag": True},
        "push_rows[i=0] on rank 0 writes extra.on(|notifies no event of that rank",
    ),
}


@pytest.mark.parametrize("what", FAULTS)
def test_a_fault_is_found(what):
    options, words = FAULTS[what]
    refused(lambda: prove(flagged_sum(2, pieces=2, **options)), words)


def test_flagged_words_order_nothing_else():
    """Rows that a peer has sent before its words need an event of their own."""

    def relayed(g: Kit, waits_for_rows: bool) -> None:
        n = 8 * g.dims("vectors")
        x, y, z = (
            f(name, (n,), "bfloat16")
            for f, name in ((g.input, "x"), (g.output, "y"), (g.output, "z"))
        )
        rows = g.symmetric("rows", (n,), "bfloat16")
        words = g.flagged("words", (2, n), "bfloat16")
        word_event = g.event("arrived", cross_rank=True, carried_by=words)
        row_event, add_event = g.event("sent", cross_rank=True), g.event("added")
        peer, grid = (g.rank + 1) % 2, g.grid(i=1)

        def add(function: Any, read: list[Any], write: Any, **more: Any) -> None:
            g.call(function, grid, reads=read, writes=[write], **more)

        to = words.on(peer)[g.rank, :]
        add(
            push_rows("tensor"),
            [x[:]],
            rows.on(peer)[:],
            notifies=[row_event.on(peer)[0]],
        )
        add(push_flagged("bfloat16", 1), [x[:]], to, notifies=[word_event.on(peer)[0]])
        events = {"waits": [word_event[0]], "notifies": [add_event[0]]}
        add(add_flagged("bfloat16"), [x[:], words[:, :]], y[:], **events)
        waits = [add_event[0], row_event[0]][: 1 + waits_for_rows]
        add(push_rows("transfer"), [rows[:]], z[:], waits=waits, name="read")

    plan = schedule_static(made(partial(relayed, waits_for_rows=True), 2))
    verify(plan, DIMS, 1)
    plan = schedule_static(made(partial(relayed, waits_for_rows=False), 2))
    words = "read[i=0] on rank 0 reads rows[0:16] on rank 0; no event orders them"
    refused(lambda: verify(plan, DIMS, 1), words)


def test_a_dynamic_schedule_counts_no_flags():
    refused(
        lambda: schedule_dynamic(EXCHANGED),
        "nothing counts arrived, which words carries",
        ScheduleError,
    )


# what: options, words of the error
GRAPHS = {
    "a plain tensor": (
        {"kind": "symmetric"},
        "carried_by= a tensor made by g.flagged(",
    ),
    "no event": ({"is_named": False}, "notifies those of []|carried_by=tensor"),
}


@pytest.mark.parametrize("what", GRAPHS)
def test_flagged_tensors_and_their_events_belong_together(what):
    options, words = GRAPHS[what]
    refused(lambda: flagged_sum(2, **options), words)


def test_only_functions_for_flagged_tensors_access_them():
    def copied(g: Kit) -> None:
        x = g.input("x", (16,), "bfloat16")
        words = g.flagged("words", (16,), "bfloat16")
        g.call(push_rows("tensor"), g.grid(i=1), reads=[x[:]], writes=[words[:]])

    refused(lambda: made(copied, 2), "a flagged tensor as an operand of another kind")


def test_races_are_of_the_kind_that_is_found():
    refused(lambda: prove(flagged_sum(2, pieces=2, waits_for=1)), "words", RaceError)
