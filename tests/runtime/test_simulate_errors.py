"""Refusals of a simulation, without those of the verifier."""

from __future__ import annotations

import numpy as np
import pytest

from etc_dist.errors import ArgumentError, DeadlockError, GraphError
from etc_dist.ir import RANK, device_function
from etc_dist.runtime.arrays import inspect
from etc_dist.runtime.cpu import simulate
from etc_dist.schedule import SCHEDULES, Plan, schedule_dynamic, schedule_static
from tests.graphs.calls import whole
from tests.graphs.ring import doubled_ring
from tests.runtime.programs import ring_inputs, with_call


def run_ring(plan: Plan, check: bool = True) -> None:
    inputs = [ring_inputs(rank, 4) for rank in range(plan.graph.world_size)]
    simulate(plan, inputs, {"rows": 4}, check=check)


def test_a_deadlock_names_rank_worker_lane_task_and_event():
    plan = with_call(schedule_static(doubled_ring(1)), "send", notifies=())
    with pytest.raises(DeadlockError, match="no task can run") as caught:
        run_ring(plan)
    assert caught.value.got == (
        "rank 0, worker 0, tensor lane: take[0] waits for here[0]: have 0, want 1"
    )


def test_a_deadlock_of_a_queue_names_each_group_once():
    silent = with_call(schedule_static(doubled_ring(2)), "send", notifies=()).graph
    with pytest.raises(DeadlockError) as caught:
        run_ring(schedule_dynamic(silent))
    assert [line.strip() for line in caught.value.got.splitlines()] == [
        f"rank {rank}, tensor lane: take[0] waits for here[0]: have 0, want 1"
        for rank in range(2)
    ]


def test_a_finished_run_is_verified():
    plan = with_call(schedule_static(doubled_ring(1)), "take", waits=())
    with pytest.raises(GraphError, match=r"writes box\[0:4\] on rank 0; no event"):
        run_ring(plan)
    run_ring(plan, check=False)


def test_a_reference_out_of_range_is_named():
    plan = schedule_static(doubled_ring(2))
    (ref,) = plan.graph.calls[0].notifies
    wrong = with_call(plan, "send", notifies=(ref.events.on(RANK + 1)[0],))
    with pytest.raises(GraphError, match=r"a rank of 0 \.\. 1") as caught:
        run_ring(wrong)
    assert caught.value.what == "an index of call send is out of range"


def test_a_list_is_not_an_array():
    with pytest.raises(TypeError, match="x expects"):
        simulate(plan_of_x(), [{"x": [0.0] * 4}], {})


def test_a_masked_array_is_refused():
    with pytest.raises(ArgumentError, match="argument x is a masked array"):
        simulate(plan_of_x(), [{"x": np.ma.zeros((), np.float32)}], {})


def test_a_tensor_without_axes_has_one_element():
    arrays = [{"x": np.array(2, np.float32)}]
    assert simulate(plan_of_x(), arrays, {}).outputs[0]["y"] == 2
    assert inspect("x", arrays[0]["x"]).row_bytes == 4


@pytest.mark.parametrize("schedule", SCHEDULES.values())
def test_a_graph_of_another_type_is_a_type_error(schedule):
    with pytest.raises(TypeError, match="graph expects a GraphFunction, got None"):
        schedule(None)


def plan_of_x():
    @device_function(source="", reads=1, writes=1)
    def copy(x, y):
        y[...] = x

    return schedule_static(whole(1, function=copy, x="", y=""))
