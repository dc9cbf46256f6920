"""Operands that a body gathers from: elements without a writer are allowed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from etc_dist.errors import GraphError, RaceError
from etc_dist.ir import Graph, device_function, graph_function, minimum
from etc_dist.runtime.cpu import simulate
from etc_dist.schedule import schedule_dynamic, schedule_static
from etc_dist.verify.verify import verify
from tests.refusals import refused

PLANS = {"static": schedule_static, "dynamic": schedule_dynamic}


@device_function(source="", reads=1, writes=1)
def double(x, y):
    y[...] = 2 * x


@device_function(source="", reads=2, writes=1, gathers=[0])
def gather(box, at, y):
    y[...] = box[at[0]]


@device_function(source="", reads=2, writes=1)
def take(box, at, y):
    y[...] = box[at[0]]


@device_function(source="", reads=3, writes=1, gathers=[0])
def gather_and_read(box, at, row, y):
    y[...] = box[at[0]] + row


@graph_function
def gathering(g: Graph, *, first: str = "writers", reader: Any = gather) -> None:
    """y is the row of 2 x that an input names; two rows of four are written. `first`
    are the "writers", the "reader", or "none" of them."""
    x, at = g.input("x", (2, 4), "float32"), g.input("at", (1,), "int32")
    box, y = g.local("box", (4, 4), "float32"), g.output("y", (4,), "float32")
    written = g.events("written", (1,), expects=2)
    read = g.events("read", (1,), expects=1)
    (i,) = grid = g.grid(i=2)
    g.call(
        double,
        grid,
        reads=[x[i, :]],
        writes=[box[i, :]],
        waits=[read[0]] if first == "reader" else [],
        notifies=[written[0]] if first == "writers" else [],
    )
    g.call(
        reader,
        g.grid(one=1),
        reads=[box[:, :], at[:], box[3, :]][: reader.reads],
        writes=[y[:]],
        waits=[written[0]] if first == "writers" else [],
        notifies=[read[0]] if first == "reader" else [],
    )


@pytest.fixture(params=PLANS)
def schedule(request):
    return PLANS[request.param]


def simulated(plan, at, seed):
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    inputs = [{"x": x, "at": np.array([at], np.int32)}]
    return simulate(plan, inputs, {}, seed=seed, epochs=2).outputs[0]["y"].tolist()


def test_rows_that_no_task_writes_may_be_gathered_from(schedule, seed):
    plan = schedule(gathering(1))
    assert verify(plan, {}, 4).unchecked == ()
    assert simulated(plan, 1, seed) == [8, 10, 12, 14]


def test_a_gathered_row_that_no_task_writes_leaves_an_output_incomplete(schedule, seed):
    with pytest.raises(GraphError, match=r"4 unwritten, the first at \[0\]"):
        simulated(schedule(gathering(1)), 3, seed)


# Options of `gathering`, and the error.
FAULTS = {
    "a plain read": ({"reader": take}, GraphError, "reads box[2"),
    "a read next to it": ({"reader": gather_and_read}, GraphError, "box[3"),
    "no order": (
        {"first": "none"},
        RaceError,
        "gather[one=0] on rank 0 reads|double[i=0] on rank 0 writes|"
        "box[0:1, 0:4] on rank 0; no event orders them",
    ),
    "written later": (
        {"first": "reader"},
        GraphError,
        "gather[one=0] on rank 0 reads box[0:1, 0:4] on rank 0 before double[i=0] on "
        "rank 0, the first to write it",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_other_reads_than_gathers_after_all_writes_are_refused(name, schedule):
    options, kind, words = FAULTS[name]
    plan = schedule(gathering(1, **options))
    assert type(refused(lambda: verify(plan, {}, 4), words, kind)) is kind


@graph_function
def gathering_in_turns(g: Graph, *, reader: Any = gather) -> None:
    """Turn n writes row n of box; then a row is gathered."""
    x, at = g.input("x", (3, 4), "float32"), g.input("at", (3, 1), "int32")
    box, y = g.local("box", (3, 4), "float32"), g.output("y", (3, 4), "float32")
    end = g.output("end", (4,), "float32")
    written = g.events("written", (3,), expects=1)
    read = g.events("read", (4,), expects=lambda n: minimum(n, 1))
    with g.loop(turn=3) as turn:
        g.call(
            double,
            g.grid(one=1),
            reads=[x[turn, :]],
            writes=[box[turn, :]],
            waits=[read[turn]],
            notifies=[written[turn]],
        )
        g.call(
            reader,
            g.grid(one=1),
            reads=[box[:, :], at[turn, :]],
            writes=[y[turn, :]],
            waits=[written[turn]],
            notifies=[read[turn + 1]],
        )
    (one,) = grid = g.grid(one=1)
    g.call(
        double, grid, name="copy", reads=[x[one, :]], writes=[end[:]], waits=[read[3]]
    )


def test_rows_of_later_turns_may_be_gathered_from(schedule):
    verify(schedule(gathering_in_turns(1)), {}, 4)
    plan = schedule(gathering_in_turns(1, reader=take))
    refused(lambda: verify(plan, {}, 4), "the first to write it")


def test_gathers_change_the_key_of_a_proof():
    reads, gathers = (gathering(1, reader=reader).show() for reader in (take, gather))
    assert "  reads box[:, :]\n  reads at[:]\n" in reads
    assert "  gathers from box[:, :]\n  reads at[:]\n" in gathers
