"""Flagged tensors: proofs, and planted faults."""

from __future__ import annotations

from typing import Any

import pytest

from etc_dist.errors import RaceError, ScheduleError
from etc_dist.functions.flags import add_flagged, push_flagged
from etc_dist.functions.push_rows import push_rows
from etc_dist.ir import Graph, GraphFunction, graph_function
from etc_dist.schedule import schedule_dynamic, schedule_static
from etc_dist.verify.verify import verify
from tests.refusals import refused

DIMS = {"n": 16}


@graph_function
def exchanged(
    g: Graph,
    *,
    answers: bool = True,
    waits_for: int = 0,
    twice: bool = False,
    reads: int = 0,
    by_flag: bool = False,
) -> None:
    """Two ranks add both x, of n elements, in two pieces. answers: both send, else rank
    0 alone. waits_for: the element that tasks wait for is so much further. twice: two
    tasks write the words. reads: so many pieces are not read. by_flag: a plain copy of
    x has no other notification than the words."""
    n = g.dims("n")
    x, y = g.input("x", (2, n), "bfloat16"), g.output("y", (2, n), "bfloat16")
    words = g.flagged("words", (2, 2, n), "bfloat16")
    extra = g.symmetric("extra", (2, n), "bfloat16")
    options: dict[str, Any] = {"cross_rank": True, "carried_by": words}
    arrived = g.events("arrived", (2,), expects=1 + twice, **options)
    peer = (g.rank + 1) % 2
    senders = 1 if answers else 1 - g.rank
    for name in ("push", "again") if twice else ("push",):
        i, _ = grid = g.grid(i=2, s=senders)
        g.call(
            push_flagged("bfloat16", 1),
            grid,
            name=name,
            reads=[x[i, :]],
            writes=[words.on(peer)[i, g.rank, :]],
            notifies=[arrived.on(peer)[i]],
        )
    if by_flag:
        (i,) = grid = g.grid(i=2)
        g.call(
            push_rows("tensor"),
            grid,
            reads=[x[i, :]],
            writes=[extra.on(peer)[i, :]],
        )
    receivers = 1 if answers else g.rank
    i, _ = grid = g.grid(i=2 - reads, s=receivers)
    g.call(
        add_flagged("bfloat16"),
        grid,
        reads=[x[i, :], words[i, :, :]],
        writes=[y[i, :]],
        waits=[arrived[(i + waits_for) % 2]],
    )
    if not answers:  # the other rank copies x
        i, _ = grid = g.grid(i=2, s=1 - g.rank)
        g.call(
            push_rows("tensor"), grid, name="copy", reads=[x[i, :]], writes=[y[i, :]]
        )


def prove(graph: GraphFunction) -> None:
    verify(schedule_static(graph), DIMS, 4)


def test_flagged_words_are_proved():
    prove(exchanged(2))
    assert "carried by words" in exchanged(2).show()


FAULTS = {
    "another event": (
        {"waits_for": 1},
        "add_flagged[i=0, s=0] on rank 0 reads words[0:1, 1:2, 0:16] on rank 0|waits "
        "for no event of the tensor that push[i=0, s=0] on rank 1 notifies",
    ),
    "two writers": (
        {"twice": True},
        "words[0:1, 1:2, 0:16] on rank 0 is written by push[i=0, s=0] on rank 1 and by "
        "again[i=0, s=0] on rank 1",
    ),
    "unread words": (
        {"reads": 1},
        "push[i=1, s=0] on rank 1 writes words[1:2, 1:2, 0:16] on rank 0, which no "
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
    refused(lambda: prove(exchanged(2, **options)), words)


def test_flagged_words_order_nothing_else():
    """Rows that a peer has sent before its words need an event of their own."""

    @graph_function
    def relayed(g: Graph, *, waits_for_rows: bool) -> None:
        n = g.dims("n")
        x, y = g.input("x", (n,), "bfloat16"), g.output("y", (n,), "bfloat16")
        z, rows = g.output("z", (n,), "bfloat16"), g.symmetric("rows", (n,), "bfloat16")
        words = g.flagged("words", (2, n), "bfloat16")
        options: dict[str, Any] = {"cross_rank": True, "carried_by": words}
        arrived = g.events("arrived", (1,), expects=1, **options)
        sent = g.events("sent", (1,), expects=1, cross_rank=True)
        added = g.events("added", (1,), expects=1)
        peer, grid = (g.rank + 1) % 2, g.grid(i=1)
        g.call(
            push_rows("tensor"),
            grid,
            reads=[x[:]],
            writes=[rows.on(peer)[:]],
            notifies=[sent.on(peer)[0]],
        )
        g.call(
            push_flagged("bfloat16", 1),
            grid,
            reads=[x[:]],
            writes=[words.on(peer)[g.rank, :]],
            notifies=[arrived.on(peer)[0]],
        )
        g.call(
            add_flagged("bfloat16"),
            grid,
            reads=[x[:], words[:, :]],
            writes=[y[:]],
            waits=[arrived[0]],
            notifies=[added[0]],
        )
        g.call(
            push_rows("transfer"),
            grid,
            name="read",
            reads=[rows[:]],
            writes=[z[:]],
            waits=[added[0], *([sent[0]] if waits_for_rows else [])],
        )

    plan = schedule_static(relayed(2, waits_for_rows=True))
    verify(plan, DIMS, 1)
    plan = schedule_static(relayed(2, waits_for_rows=False))
    words = "read[i=0] on rank 0 reads rows[0:16] on rank 0; no event orders them"
    refused(lambda: verify(plan, DIMS, 1), words)


def test_a_dynamic_schedule_counts_no_flags():
    refused(
        lambda: schedule_dynamic(exchanged(2)),
        "nothing counts arrived, which words carries",
        ScheduleError,
    )


# what: kind of the tensor, whether the call names its event, words of the error
GRAPHS = {
    "a plain tensor": ("symmetric", True, "carried_by= a tensor made by g.flagged("),
    "no event": ("flagged", False, "notifies those of []|carried_by=tensor"),
}


@pytest.mark.parametrize("what", GRAPHS)
def test_flagged_tensors_and_their_events_belong_together(what):
    kind, is_named, words = GRAPHS[what]

    @graph_function
    def sent(g: Graph) -> None:
        x = g.input("x", (16,), "bfloat16")
        slots = getattr(g, kind)("slots", (2, 16), "bfloat16")
        options: dict[str, Any] = {"cross_rank": True, "carried_by": slots}
        arrived = g.events("arrived", (1,), expects=1, **options)
        peer = (g.rank + 1) % 2
        g.call(
            push_flagged("bfloat16", 1),
            g.grid(i=1),
            reads=[x[:]],
            writes=[slots.on(peer)[g.rank, :]],
            notifies=[arrived.on(peer)[0]] if is_named else [],
        )

    refused(lambda: sent(2), words)


def test_only_functions_for_flagged_tensors_access_them():
    @graph_function
    def copied(g: Graph) -> None:
        x = g.input("x", (16,), "bfloat16")
        words = g.flagged("words", (16,), "bfloat16")
        g.call(push_rows("tensor"), g.grid(i=1), reads=[x[:]], writes=[words[:]])

    refused(lambda: copied(2), "a flagged tensor as an operand of another kind")


def test_races_are_of_the_kind_that_is_found():
    refused(lambda: prove(exchanged(2, waits_for=1)), "words", RaceError)
