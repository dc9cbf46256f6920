"""Mixtures of experts that fail: an error on all ranks, and the next one runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from etc_dist.errors import WaitTimeoutError
from etc_dist.ir import GraphFunction
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
