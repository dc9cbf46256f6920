"""The expert-parallel mixture of experts on ranks with different numbers of tokens."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from etc_dist.emulate import Emulator
from etc_dist.errors import ArgumentError
from etc_dist.functions.router import Router
from etc_dist.functions.routing import Mixture
from etc_dist.layers.moe import MoE, SharedMoE
from etc_dist.layers.moe_steps import SCORE_TASKS, Sizes
from etc_dist.runtime.cpu import simulate
from etc_dist.schedule import SCHEDULES
from etc_dist.verify.verify import verify
from tests.conftest import first_always
from tests.graphs.mixtures import moe_graph
from tests.layers.reference import (
    Answer,
    aim,
    draw,
    draw_experts,
    moe_reference,
    own_experts,
)
from tests.layers.test_moe_hosts import SMALL, example
from tests.refusals import refused

COUNTS = [(3, 40, 0, 7), (40, 3, 9, 0), (0, 0, 5, 0), (0, 0, 0, 0), (6, 6, 6, 6)]
"""Of each rank, in calls in a row."""


@pytest.fixture
def of_ranks(world, rng):
    """Weights, and rows of each rank, whose counts repeat on further ranks."""
    weights = draw_experts(rng, 4 * world.size, 40, 24)
    return weights, lambda counts: [
        draw(rng, (counts[rank % len(counts)], 40), "bfloat16")
        for rank in range(world.size)
    ]


@pytest.fixture
def make(world, arrays):
    """Makes layers."""

    def make(weights, **options):
        share = own_experts(weights, "expert", world.rank, world.size)
        put = map(arrays.put, share)
        return MoE(*put, top_k=2, parallel="expert", world=world, **options)

    return make


@pytest.mark.mpi(ranks=[2])
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


@pytest.mark.mpi(ranks=[1, 2])
def test_an_array_says_how_many_rows_are_tokens(make, of_ranks, world, arrays, capfd):
    """In calls with the same arrays, as in replays of a CUDA graph. None at all is no
    reason for a message."""
    weights, draw_rows = of_ranks
    x = draw_rows((40, 35))[world.rank]
    put, count = arrays.put(x), arrays.put(np.zeros(1, np.int32))
    with make(weights, has_count=True) as moe:
        for numbers in ((0, 0), (40, 35), (33, 0), (0, 99), (-1, 1)):
            count[...] = number = numbers[world.rank % 2]
            number = max(0, number)
            y = moe(put, count=count)
            moe.synchronize()
            few = moe_reference(x[:number], weights, 2)
            few.check(arrays.get(y)[:number].reshape(few.expected.shape))
    assert "no body has filled" not in capfd.readouterr().err


@pytest.mark.mpi(ranks=[1, 2])
def test_a_count_is_passed_where_the_layer_has_one(make, of_ranks, world, arrays):
    weights, draw_rows = of_ranks
    x = arrays.put(draw_rows((3, 3))[world.rank])
    counts = [arrays.put(np.full(n, 3, np.int32)) for n in (1, 2)]
    for has_count, count, words in (
        (True, None, "wanted: count, an int32 array [1]|got: None"),
        (False, counts[0], "wanted: no count|got: count"),
        (True, counts[1], "wanted: count [1] int32|got: count [2] int32"),
    ):
        with make(weights, has_count=has_count) as moe:
            refused(lambda: moe(x, count=count), words, ArgumentError)  # noqa: B023


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
    share = own_experts(weights, "expert", world.rank, world.size)
    sizes = {"mixture": Mixture(4 * world.size, Router(2)), "hidden": 40, "inner": 24}
    with SharedMoE(**sizes, parallel="expert", world=world) as moe:
        y = moe.call([*map(arrays.put, (x, *share))])
    moe_reference(x, weights, 2).check(arrays.get(y).reshape(x.shape))


@pytest.mark.parametrize(("local_size", "schedule"), [(2, "dynamic"), (1, "static")])
def test_a_count_is_read_when_the_graph_runs(local_size, schedule):
    """On one host and on two."""
    options = {"experts": 8, "top_k": 2, "parallel": "expert", "shared": "gated"}
    options |= {"has_count": True, "sizes": SMALL}
    plan = SCHEDULES[schedule](moe_graph(2, local_size=local_size, **options))
    inputs, answers, dims = example(2, 8, 2, (19, 9), 24, 16)
    run = partial(simulate, plan, dims=dims)
    check_counts(inputs, answers, [9, 12], lambda inputs: run(inputs).outputs)


def check_counts(inputs, answers, counts, run):
    """The results of a run in which only the first rows are tokens."""
    for arrays, count in zip(inputs, counts, strict=True):
        arrays["count"] = np.array([count], np.int32)
    results = run(inputs)
    for answer, arrays, count in zip(answers, results, counts, strict=True):
        few = Answer(answer.expected[:count], answer.magnitude[:count])
        few.check(arrays["y"][:count])


@pytest.mark.parametrize("schedule", ["static", "dynamic"])
def test_the_graph_is_proved_for_the_largest_number_and_right_for_others(schedule):
    options = {"experts": 9, "top_k": 3, "parallel": "expert", "shared": "gated"}
    plan = SCHEDULES[schedule](moe_graph(3, **options, sizes=SMALL))
    inputs, answers, dims = example(3, 9, 3, (1, 19, 0), 24, 16)
    verify(plan, dims, 4)
    results = simulate(plan, inputs, dims, epochs=2, seed=1).outputs
    for answer, outputs in zip(answers, results, strict=True):
        assert outputs["y"].shape == answer.expected.shape
        answer.check(outputs["y"])


@pytest.mark.parametrize(
    ("schedule", "score_tasks", "has_count"),
    first_always([("static", SCORE_TASKS, True), ("dynamic", 1, False)], 1),
)
def test_the_cuda_bodies_leave_out_rows_without_a_token(
    schedule, score_tasks, has_count
):
    """Also where logits are computed in tiles."""
    options = {"experts": 8, "top_k": 2, "parallel": "expert", "shared": "gated"}
    options |= {"sizes": Sizes(score_tasks=score_tasks), "has_count": has_count}
    program = Emulator(moe_graph(2, **options), schedule=schedule, workers=2)
    for rows, counts in (((0, 35), (3, 9)), ((33, 2), (32, 2))):
        inputs, answers, dims = example(2, 8, 2, rows, 40, 24)
        if has_count:
            check_counts(inputs, answers, counts, partial(program.run, dims=dims))
            continue
        for answer, outputs in zip(answers, program.run(inputs, dims), strict=True):
            answer.check(outputs["y"])
