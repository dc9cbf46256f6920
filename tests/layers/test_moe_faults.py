"""Mixtures of experts that cannot end: an error on all ranks, and the next one runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from etc_dist.errors import WaitTimeoutError
from etc_dist.ir import GraphFunction
from etc_dist.layers.moe_graph import moe_graph
from tests.layers.test_mlp import without

SIZES = (8, 64, 72)
WAITING = {"gate_up_projection", "down_projection", "combine_rows", "sum_parts"}
WAITING |= {"locate_rows"}
"""What waits in vain, at once or in the end, where nothing is listed or activated."""


@pytest.fixture
def lacking(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """From then on layers are made of a graph in which nobody notifies an event."""

    def lacking(event: str) -> None:
        def make(*arguments: Any, **options: Any) -> GraphFunction:
            return without(moe_graph(*arguments, **options), event, "notifies")

        monkeypatch.setattr("etc_dist.layers.moe.moe_graph", make)

    return lacking


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("schedule", "event"), [("static", "activated"), ("dynamic", "listed")]
)
def test_a_wait_in_vain_ends_all_ranks_and_the_next_layer_runs(
    schedule, event, lacking, make_parallel, arrays, hasty
):
    options = {"top_k": 2, "parallel": "expert", "schedule": schedule}
    right = make_parallel(*SIZES, **options)
    lacking(event)
    wrong = make_parallel(*SIZES, **options)
    x, out, _ = wrong.rows(5)
    with pytest.raises(WaitTimeoutError) as caught:
        wrong.moe(x, out)
        wrong.moe.synchronize()
    tasks = {record.task.partition("[")[0] for record in caught.value.records}
    assert tasks and tasks <= WAITING
    x, out, answer = right.rows(5)
    right.moe(x, out)
    right.moe.synchronize()
    answer.check(arrays.get(out))
