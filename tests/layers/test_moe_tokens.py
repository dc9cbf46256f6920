"""The expert-parallel mixture of experts on ranks with different numbers of tokens."""

from __future__ import annotations

import numpy as np
import pytest

from etc_dist.emulate import Emulator
from etc_dist.errors import ArgumentError
from etc_dist.functions.router import Router
from etc_dist.layers.moe import MoE, SharedMoE
from etc_dist.layers.moe_graph import moe_graph
from etc_dist.layers.moe_steps import SCORE_TASKS
from etc_dist.runtime.cpu import simulate
from etc_dist.schedule import SCHEDULES
from etc_dist.verify.verify import verify
from tests.conftest import first_always
from tests.layers.reference import aim, draw, draw_experts, moe_reference, own_experts
from tests.layers.test_moe_hosts import SMALL, example

COUNTS = [(3, 40, 0, 7), (40, 3, 9, 0), (0, 0, 5, 0), (0, 0, 0, 0), (6, 6, 6, 6)]
"""Of each rank, in calls in a row."""


@pytest.fixture
def of_ranks(world, rng):
    """Weights, and rows of each rank."""
    weights = draw_experts(rng, 4 * world.size, 40, 24)
    return weights, lambda counts: [
        draw(rng, (count, 40), "bfloat16") for count in counts[: world.size]
    ]


@pytest.fixture
def make(world, arrays):
    """Makes layers."""

    def make(weights):
        own = own_experts(weights, "expert", world.rank, world.size)
        put = map(arrays.put, own)
        return MoE(*put, top_k=2, parallel="expert", world=world)

    return make


@pytest.mark.mpi(ranks=[2, 4])
def test_ranks_pass_different_numbers_of_tokens(make, of_ranks, world, arrays):
    weights, draw_rows = of_ranks
    with make(weights) as moe:
        for counts in [*COUNTS, COUNTS[0]]:
            x = draw_rows(counts)[world.rank]
            y = moe(arrays.put(x))
            moe.synchronize()
            moe_reference(x, weights, 2).check(arrays.get(y).reshape(x.shape))


@pytest.mark.mpi(ranks=[2])
def test_a_remembered_call_follows_the_largest_number(make, of_ranks, world, arrays):
    weights, draw_rows = of_ranks
    first = draw_rows((3, 0))[0]
    put, out = arrays.put(first), arrays.poisoned(first.shape, "bfloat16")
    with make(weights) as moe:
        for count in (2, 40, 0, 40):
            if world.rank == 0:
                x, y = first, moe(put, out)
            else:
                x = draw_rows((0, count))[1]
                y = moe(arrays.put(x))
            moe.synchronize()
            moe_reference(x, weights, 2).check(arrays.get(y).reshape(x.shape))


@pytest.mark.mpi(ranks=[2, 4])
def test_all_tokens_may_choose_the_experts_of_one_rank(make, of_ranks, world, arrays):
    weights, draw_rows = of_ranks
    xs = draw_rows((33, 0, 2, 1))
    for x in xs:
        aim(x, weights, np.array([[5, 4]] * len(x), np.int64).reshape(-1, 2))
    x = xs[world.rank]
    with make(weights) as moe:
        y = moe(arrays.put(x))
    moe_reference(x, weights, 2).check(arrays.get(y).reshape(x.shape))


@pytest.mark.mpi(ranks=[2])
def test_wrong_tokens_of_one_rank_are_refused_on_all(make, of_ranks, world, arrays):
    weights, draw_rows = of_ranks
    x = draw_rows((3, 5))[world.rank]
    wrong = np.zeros((4, 48), x.dtype) if world.rank else x
    with make(weights) as moe:
        with pytest.raises(ArgumentError, match=r"got: +x \[4, 48\]"):
            moe(arrays.put(wrong))
        y = moe(arrays.put(x))
    moe_reference(x, weights, 2).check(arrays.get(y))


@pytest.mark.mpi(ranks=[2])
def test_the_first_call_may_be_of_no_tokens_on_a_rank(of_ranks, world, arrays):
    weights, draw_rows = of_ranks
    x = draw_rows((0, 5))[world.rank]
    own = own_experts(weights, "expert", world.rank, world.size)
    sizes = {"experts": 4, "hidden": 40, "inner": 24, "router": Router(2)}
    with SharedMoE(**sizes, parallel="expert", world=world) as moe:
        y = moe.call([*map(arrays.put, (x, *own))])
    moe_reference(x, weights, 2).check(arrays.get(y).reshape(x.shape))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_graph_is_proved_for_the_largest_number_and_right_for_others(schedule):
    options = {"experts": 9, "top_k": 3, "parallel": "expert", "shared": "gated"}
    plan = SCHEDULES[schedule](moe_graph(3, **options, **SMALL))
    inputs, answers, dims = example(3, 9, 3, (1, 19, 0), 24, 16)
    verify(plan, dims, 4)
    found = simulate(plan, inputs, dims, epochs=2, seed=1).outputs
    for answer, one in zip(answers, found, strict=True):
        assert one["y"].shape == answer.expected.shape
        answer.check(one["y"])


@pytest.mark.parametrize(
    ("schedule", "score_tasks"),
    first_always([("static", SCORE_TASKS), ("dynamic", 1)], 1),
)
def test_the_cuda_bodies_leave_out_rows_without_a_token(schedule, score_tasks):
    """Also where logits are computed in tiles."""
    options = {"experts": 8, "top_k": 2, "parallel": "expert", "shared": "gated"}
    graph = moe_graph(2, **options, score_tasks=score_tasks)
    program = Emulator(graph, schedule=schedule, workers=2)
    for counts in ((0, 35), (33, 2)):
        inputs, answers, dims = example(2, 8, 2, counts, 40, 24)
        found = program.run(inputs, dims)
        for answer, one in zip(answers, found, strict=True):
            answer.check(one["y"])
