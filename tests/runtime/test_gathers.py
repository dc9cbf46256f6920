"""Operands that a body gathers from: elements without a writer are allowed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from etc_dist.errors import GraphError, RaceError
from etc_dist.ir import GraphFunction, device_function
from etc_dist.runtime.cpu import simulate
from etc_dist.schedule import schedule_dynamic, schedule_static
from etc_dist.verify.verify import verify
from tests.graphs.calls import Task, calls
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


def gathering(first: str = "writers", reader: Any = gather) -> GraphFunction:
    """y is the row of 2 x that an input names; two rows of four are written. `first`
    are the "writers", the "reader", or "none" of them."""
    parts = """
        local box [4, 4] float32
        events written [1] expects 2
        events read [1] expects 1
    """
    waits = ["written[0]"] if first == "writers" else []
    read = ["read[0]"] if first == "reader" else []
    reads = ["box[:, :]", "at 1 int32", "box[3, :]"][: reader.reads]
    tasks = [
        Task(
            double,
            ["x 2[i] 4 float32"],
            ["box[i, :]"],
            grid="i: 2",
            waits=read,
            notifies=waits,
        ),
        Task(reader, reads, ["y 4 float32"], grid="one: 1", waits=waits, notifies=read),
    ]
    return calls(1, tasks=tasks, parts=parts)


@pytest.fixture(params=PLANS)
def schedule(request):
    return PLANS[request.param]


def simulated(plan, at, seed):
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    inputs = [{"x": x, "at": np.array([at], np.int32)}]
    return simulate(plan, inputs, {}, seed=seed, epochs=2).outputs[0]["y"].tolist()


def test_rows_that_no_task_writes_may_be_gathered_from(schedule, seed):
    plan = schedule(gathering())
    assert verify(plan, {}, 4).unchecked == ()
    assert simulated(plan, 1, seed) == [8, 10, 12, 14]


def test_a_gathered_row_that_no_task_writes_leaves_an_output_incomplete(schedule, seed):
    with pytest.raises(GraphError, match=r"4 unwritten, the first at \[0\]"):
        simulated(schedule(gathering()), 3, seed)


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
    plan = schedule(gathering(**options))
    assert type(refused(lambda: verify(plan, {}, 4), words, kind)) is kind


def gathering_in_turns(reader: Any = gather) -> GraphFunction:
    """Turn n writes row n of box; then a row is gathered."""
    parts = """
        local box [3, 4] float32
        events written [3] expects 1
        events read [n: 4] expects minimum(n, 1)
    """
    by_turn = {"grid": "one: 1", "loop": "turn: 3"}
    tasks = [
        Task(
            double,
            ["x 3[turn] 4 float32"],
            ["box[turn, :]"],
            waits=["read[turn]"],
            notifies=["written[turn]"],
            **by_turn,
        ),
        Task(
            reader,
            ["box[:, :]", "at 3[turn] 1 int32"],
            ["y 3[turn] 4 float32"],
            waits=["written[turn]"],
            notifies=["read[turn + 1]"],
            **by_turn,
        ),
        Task(
            double,
            ["x[one, :]"],
            ["end 4 float32"],
            name="copy",
            grid="one: 1",
            waits=["read[3]"],
        ),
    ]
    return calls(1, tasks=tasks, parts=parts)


def test_rows_of_later_turns_may_be_gathered_from(schedule):
    verify(schedule(gathering_in_turns()), {}, 4)
    plan = schedule(gathering_in_turns(reader=take))
    refused(lambda: verify(plan, {}, 4), "the first to write it")


def test_gathers_change_the_key_of_a_proof():
    reads, gathers = (gathering(reader=reader).show() for reader in (take, gather))
    assert "  reads box[:, :]\n  reads at[:]\n" in reads
    assert "  gathers from box[:, :]\n  reads at[:]\n" in gathers
