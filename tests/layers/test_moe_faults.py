"""Mixtures of experts that fail: an error on all ranks, and the next one runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from etc_dist.errors import ArgumentError, WaitTimeoutError
from etc_dist.ir import Call, GraphFunction
from etc_dist.layers.moe_graph import moe_graph
from tests.layers.programs import without

SIZES = (64, 72)
WAITING = {"gate_up_projection", "down_projection", "combine_rows", "sum_ranks"}
WAITING |= {"locate_rows", "plan_tiles"}
"""Calls whose waits time out if nothing is listed or activated."""
TWO = np.array([[3, 6]] * 200)
"""All tokens choose the same two experts, so that most tiles are empty."""


@pytest.fixture
def lacking(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes later layers use a graph in which no task notifies an event."""

    def lacking(event: str) -> None:
        def make(*arguments: Any, **options: Any) -> GraphFunction:
            return without(moe_graph(*arguments, **options), event, "notifies")

        monkeypatch.setattr("etc_dist.layers.moe.moe_graph", make)

    return lacking


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("schedule", "event"), [("static", "activated"), ("dynamic", "listed")]
)
def test_a_timeout_ends_all_ranks_and_the_next_layer_runs(
    schedule, event, lacking, make, short_timeout
):
    kind = "moe expert-parallel"
    right = make(kind, *SIZES, schedule=schedule)
    lacking(event)
    wrong = make(kind, *SIZES, schedule=schedule)
    x, out, _ = wrong.rows(5)
    with pytest.raises(WaitTimeoutError) as caught:
        wrong.layer(x, out)
        wrong.layer.synchronize()
    tasks = {record.task.partition("[")[0] for record in caught.value.records}
    assert tasks and tasks <= WAITING
    right.check(5)


def reversed_tiles(call: Call) -> Call:
    """The call `down_projection` with its tiles in reverse order: empty ones first."""
    part, tile, column = call.order
    last = call.axes[1].extent - 1
    return replace(call, order=(part, last - tile, column))


def test_a_task_that_must_be_empty_and_is_not_ends_the_run(monkeypatch, make):
    def turned(*arguments: Any, **options: Any) -> GraphFunction:
        graph = moe_graph(*arguments, **options)
        name = "down_projection"
        calls = (reversed_tiles(c) if c.name == name else c for c in graph.calls)
        return replace(graph, calls=tuple(calls))

    monkeypatch.setattr("etc_dist.layers.moe.moe_graph", turned)
    wrong = make("moe", 256, 72, experts=256)
    x, out, _ = wrong.rows(200, TWO)
    with pytest.raises(ArgumentError) as caught:
        wrong.layer(x, out)
        wrong.layer.synchronize()
    assert "does not fit its graph" in caught.value.what
    assert "down_projection" in caught.value.where
    assert "empty_until is after this task" in caught.value.wanted
    monkeypatch.undo()
    right = make("moe", 256, 72, experts=256)
    right.check(200, TWO)
