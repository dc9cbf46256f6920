"""Operands that a body gathers from: elements without a writer are allowed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from etc_dist.errors import GraphError, RaceError
from etc_dist.ir import Graph, device_function, graph_function
from etc_dist.runtime.cpu import simulate
from etc_dist.schedule import schedule_dynamic, schedule_static
from etc_dist.verify.verify import verify

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
    are the "writers", the "reader", or "nobody"."""
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
def found(request, seed):
    """What the proof and a simulation say of a graph."""
    schedule = PLANS[request.param]

    def proof(graph):
        return verify(schedule(graph), {}, 4)

    def simulation(graph, at=1):
        x = np.arange(8, dtype=np.float32).reshape(2, 4)
        inputs = [{"x": x, "at": np.array([at], np.int32)}]
        return simulate(schedule(graph), inputs, {}, seed=seed, epochs=2).outputs[0]

    return proof, simulation


def test_rows_that_no_task_writes_may_be_gathered_from(found):
    proof, simulation = found
    assert proof(gathering(1)).unchecked == ()
    assert simulation(gathering(1))["y"].tolist() == [8, 10, 12, 14]


def test_a_row_that_no_task_writes_is_refused_where_it_is_picked(found):
    _, simulation = found
    with pytest.raises(GraphError, match=r"y\[0\] is the first"):
        simulation(gathering(1), at=3)


def test_the_same_read_that_does_not_pick_is_refused(found):
    graph = gathering(1, reader=take)
    for check in found:
        with pytest.raises(GraphError, match=r"reads? .*box\[2|box\[2, 0\] .*is read"):
            check(graph)


def test_what_is_read_beside_must_be_written(found):
    graph = gathering(1, reader=gather_and_read)
    for check in found:
        with pytest.raises(GraphError, match=r"box\[3"):
            check(graph)


@pytest.mark.parametrize("turn", range(8))
@pytest.mark.parametrize("found", ["static"], indirect=True)
def test_writes_that_nothing_orders_before_a_pick_are_a_race(found, turn):
    graph = gathering(1, first="nobody")
    proof, simulation = found
    with pytest.raises(RaceError) as caught:
        proof(graph)
    assert "gather[one=0] on rank 0 reads" in caught.value.got
    assert "double[i=0] on rank 0 writes" in caught.value.got
    assert "box[0:1, 0:4] on rank 0; no event orders them" in caught.value.got
    with pytest.raises(RaceError) as caught:
        simulation(graph)
    assert "two tasks touch box[" in caught.value.what
    assert ": gather[" in str(caught.value) and ": double[" in str(caught.value)


@pytest.mark.parametrize("turn", range(8))
@pytest.mark.parametrize("found", ["dynamic"], indirect=True)
def test_a_dynamic_pick_that_no_write_is_ordered_before_is_refused(found, turn):
    graph = gathering(1, first="nobody")
    proof, simulation = found
    with pytest.raises(RaceError, match=r"gather\[one=0\] on rank 0"):
        proof(graph)
    # NOTE: a worker may happen to take the one after the other, which is no race.
    with pytest.raises(GraphError, match=r"touch box\[|is read before double\["):
        simulation(graph)


def test_writes_that_are_ordered_after_a_pick_are_refused(found):
    graph = gathering(1, first="reader")
    proof, simulation = found
    with pytest.raises(GraphError) as caught:
        proof(graph)
    assert (
        "gather[one=0] on rank 0 reads box[0:1, 0:4] on rank 0 before double[i=0] on "
        "rank 0, the first to write it"
    ) in caught.value.got
    with pytest.raises(GraphError) as caught:
        simulation(graph)
    assert "of rank 0 is read before double[" in caught.value.what
    assert ": gather[0]" in caught.value.where


def test_a_proof_is_another_one_where_the_reads_pick():
    reads, gathers = (gathering(1, reader=reader).show() for reader in (take, gather))
    assert "  reads box[:, :]\n  reads at[:]\n" in reads
    assert "  gathers from box[:, :]\n  reads at[:]\n" in gathers
