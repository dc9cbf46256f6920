"""The mixture of experts for few tokens: its graph proved and simulated, and the layer
that picks it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etc_dist.errors import RaceError
from etc_dist.ir import GraphFunction
from etc_dist.layers.moe import MoE
from etc_dist.layers.moe_few_tokens import (
    ASKED_BYTES,
    FEW_TOKENS,
    moe_few_tokens_graph,
    most_tokens,
)
from etc_dist.schedule import schedule_static
from etc_dist.verify.verify import verify
from tests.layers.reference import TOLERANCE, draw, draw_experts, moe_reference
from tests.layers.test_mlp import without
from tests.layers.test_moe import PLANS, run

DIMS = {"tokens": 2, "hidden": 40, "inner": 19}
sizes = st.fixed_dictionaries(
    {
        "tokens": st.integers(1, 5),
        "hidden": st.integers(1, 50),
        "inner": st.integers(1, 30),
    }
)


def small(experts: int = 8, top_k: int = 2, **options: Any) -> GraphFunction:
    """The graph cut into about 6 tasks a product."""
    sizes = {"product_tasks": 6, "score_tasks": 4}
    return moe_few_tokens_graph(1, experts=experts, top_k=top_k, **sizes, **options)


@settings(max_examples=30, deadline=None)
@given(
    dims=sizes,
    experts=st.sampled_from([8, 24]),
    top_k=st.integers(1, 8),
    pairs=st.integers(1, 5),
)
def test_graph_is_proved_at_odd_shapes(dims, experts, top_k, pairs):
    proof = verify(schedule_static(small(experts, top_k)), dims, 2 * pairs)
    assert proof.unchecked == ()


@pytest.mark.parametrize("tokens", [1, 3, FEW_TOKENS])
@pytest.mark.parametrize(
    ("experts", "top_k", "hidden", "inner"),
    [(128, 8, 2048, 768), (8, 2, 4096, 14336)],
    ids=["qwen3-30b-a3b", "mixtral-8x7b"],
)
def test_graph_is_proved_at_a_real_shape(tokens, experts, top_k, hidden, inner):
    graph = moe_few_tokens_graph(1, experts=experts, top_k=top_k)
    dims = {"tokens": tokens, "hidden": hidden, "inner": inner}
    assert verify(schedule_static(graph), dims, 132).unchecked == ()


@pytest.mark.parametrize(
    ("event", "race"),
    [
        ("routed", "score_token[m=0, e=0] on rank 0 writes and gate_up_token"),
        ("activated", "down_token[m=0, j=0] on rank 0 reads"),
    ],
)
def test_each_event_is_needed(event, race):
    graph = without(small(), event, "waits", "notifies")
    with pytest.raises(RaceError) as caught:
        verify(schedule_static(graph), DIMS, 4)
    assert race in caught.value.got


def test_weights_are_sent_for_once_the_experts_are_picked():
    graph = without(small(), "picked", "waits", "notifies")
    with pytest.raises(RaceError) as caught:
        verify(schedule_static(graph), DIMS, 4)
    assert "pick_token[m=0] on rank 0 writes and down_token[" in caught.value.got
    assert "reads early ids[0:1, 0:2]" in caught.value.got


@settings(max_examples=30, deadline=None)
@given(
    dims=sizes,
    experts=st.sampled_from([8, 16, 40]),
    top_k=st.integers(1, 8),
    normalize=st.booleans(),
    dtype=st.sampled_from(sorted(TOLERANCE)),
    seed=st.integers(0, 2**32 - 1),
)
def test_odd_shapes_give_the_same_bits_near_fp32(
    dims, experts, top_k, normalize, dtype, seed
):
    rng = np.random.default_rng(seed)
    tokens, hidden, inner = dims.values()
    # Small integers: logits are exact, and often equal.
    x = rng.integers(-1, 2, (tokens, hidden)).astype(draw(rng, (1,), dtype).dtype)
    weights = draw_experts(rng, experts, hidden, inner, dtype)
    weights[0][...] = rng.integers(-1, 2, weights[0].shape)
    graph = small(experts, top_k, normalize=normalize, dtype=dtype)
    runs = [run(graph, x, weights, seed=seed, epochs=2, schedule=s) for s in PLANS]
    assert len({y.tobytes() for y in runs}) == 1
    moe_reference(x, weights, top_k, normalize).check(runs[0], dtype)


# ------------------------------------------------------------------------- the layer


# Tails of steps and of pairs, more steps than one for each warp in either product,
# numbers of experts that fill no word of 32 and no task of the router, as many tokens
# as may be, more tiles of pairs a task than one round has, experts that are picked
# before the first weights are sent for and others that are picked after.
@pytest.mark.mpi
@pytest.mark.parametrize(
    ("tokens", "experts", "hidden", "inner", "top_k", "normalize", "dtype"),
    [
        (1, 8, 8, 8, 1, True, "bfloat16"),
        (1, 8, 1288, 72, 8, False, "bfloat16"),
        (2, 24, 264, 40, 3, True, "float16"),
        (3, 136, 40, 24, 16, False, "float16"),
        (3, 256, 40, 24, 16, True, "bfloat16"),
        (FEW_TOKENS, 256, 24, 16, 4, True, "bfloat16"),
        (1, 16, 40, 1288, 2, True, "bfloat16"),
        (1, 16, 40, 1288, 8, True, "bfloat16"),
        (FEW_TOKENS, 8, 8, 776, 8, True, "bfloat16"),
    ],
    ids=str,
)
def test_few_tokens_come_close_to_fp32(
    tokens, experts, hidden, inner, top_k, normalize, dtype, make_moe, arrays
):
    options = {"dtype": dtype, "top_k": top_k, "normalize": normalize}
    layer = make_moe(experts, hidden, inner, few_tokens=FEW_TOKENS, **options)
    for _ in range(2):
        x, out, answer = layer.rows(tokens)
        layer.moe(x, out)
        layer.moe.synchronize()
        assert layer.moe.program.plan.graph.name == "moe_few_tokens_graph"
        answer.check(arrays.get(out), dtype)


@pytest.mark.mpi
def test_both_schedules_and_repeats_give_the_same_bits(make_moe, arrays):
    bits = set()
    for schedule in PLANS:
        layer = make_moe(
            16, 520, 264, top_k=4, few_tokens=FEW_TOKENS, schedule=schedule
        )
        x, out, answer = layer.rows(FEW_TOKENS)
        for _ in range(3):
            out = arrays.poisoned(out.shape, "bfloat16")
            layer.moe(x, out)
            layer.moe.synchronize()
            bits.add(arrays.get(out).tobytes())
        assert answer.error(arrays.get(out)) < 1.5 * TOLERANCE["bfloat16"]
    assert len(bits) == 1


@pytest.mark.mpi
@pytest.mark.parametrize("experts", [136, 256])
def test_of_equal_logits_the_lower_expert_wins(experts, one_rank, arrays, rng):
    weights = draw_experts(rng, experts, 40, 24)
    weights[0][...] = rng.integers(-1, 2, weights[0].shape)
    put = [arrays.put(weight) for weight in weights]
    moe = MoE(*put, top_k=16, world=one_rank)
    for tokens in (2, FEW_TOKENS + 3):  # by either program
        x = rng.integers(-1, 2, (tokens, 40)).astype(weights[0].dtype)
        y = moe(arrays.put(x))
        moe.synchronize()
        moe_reference(x, weights, 16).check(arrays.get(y))
    moe.close()


@pytest.mark.mpi
def test_tokens_may_pick_the_same_experts(make_moe, arrays):
    ids = np.array([[5, 2], [2, 5], [5, 0], [7, 5]])
    layer = make_moe(8, 40, 24, top_k=2, few_tokens=FEW_TOKENS)
    x, out, answer = layer.rows(4, ids)
    layer.moe(x, out)
    layer.moe.synchronize()
    answer.check(arrays.get(out))


@pytest.mark.mpi
def test_few_and_many_tokens_take_turns(make_moe, arrays, compiled):
    layer = make_moe(8, 40, 24, top_k=2, few_tokens=FEW_TOKENS)
    # Without meeting between.
    calls = [layer.rows(count) for count in (1, FEW_TOKENS + 1, FEW_TOKENS, 300, 2)]
    names = []
    for x, out, _ in calls:
        layer.moe(x, out)
        names.append(layer.moe.program.plan.graph.name)
    layer.moe.synchronize()
    for _, out, answer in calls:
        answer.check(arrays.get(out))
    few, many = "moe_few_tokens_graph", "moe_graph"
    assert names == [few, many, few, many, few]
    assert compiled == [many, few]
    rooms = layer.moe.program.room({"tokens": 2, "hidden": 40, "inner": 24})
    assert [dims["tokens"] for dims in rooms] == [*range(1, FEW_TOKENS + 1)]


def asked(name: str, tokens: int, hidden: int, inner: int) -> list[int]:
    """The rows of down that the tasks of a product ask for, of all tasks."""
    graph = moe_few_tokens_graph(1, experts=8, top_k=2)
    call = next(c for c in graph.calls if c.name == name)
    env = graph.environment({"tokens": tokens, "hidden": hidden, "inner": inner}, 0)
    m, j = (axis.symbol.name for axis in call.axes)
    rows: list[int] = []
    for task in range(int(call.tasks.evaluate(env)) // tokens):
        _, of_rows, _ = call.reads[4].bounds({**env, m: 0, j: task})
        rows += range(*of_rows)
    return rows


@pytest.mark.parametrize("name", ["gate_up_token", "down_token"])
@pytest.mark.parametrize("hidden", [8, 40, 2047, 2048])
def test_of_one_token_all_rows_of_down_are_asked_for_once(hidden, name):
    fits = ASKED_BYTES // (2 * 2 * hidden)
    assert (
        asked(name, 1, hidden, 24) == asked(name, 1, hidden, fits) == [*range(hidden)]
    )
    assert asked(name, 1, hidden, fits + 1) == asked(name, 2, hidden, 24) == []


def test_few_tokens_are_those_that_read_little():
    assert most_tokens(8, 2048, 768) == 4  # qwen3-30b-a3b
    assert most_tokens(2, 4096, 14336) == 0  # mixtral-8x7b
    assert most_tokens(2, 40, 24) == FEW_TOKENS


@pytest.mark.mpi
def test_a_layer_of_large_experts_has_one_program(make_moe, arrays, monkeypatch):
    read = 2 * 3 * 40 * 24 * 2
    for tokens, name in ((1, "moe_few_tokens_graph"), (0, "moe_graph")):
        limit = read * (tokens + 1) - 1
        monkeypatch.setattr("etc_dist.layers.moe_few_tokens.FEW_BYTES", limit)
        layer = make_moe(8, 40, 24, top_k=2, few_tokens=FEW_TOKENS)
        for count in (2, 1):
            x, out, answer = layer.rows(count)
            layer.moe(x, out)
            layer.moe.synchronize()
            answer.check(arrays.get(out))
        assert layer.moe.program.plan.graph.name == name


@pytest.mark.mpi
def test_both_programs_route_as_the_arguments_say(one_rank, arrays, rng):
    weights = draw_experts(rng, 8, 40, 24)
    put = [arrays.put(weight) for weight in weights]
    moe = MoE(*put, top_k=3, normalize=False, world=one_rank)
    for tokens in (1, 17):
        x = draw(rng, (tokens, 40), "bfloat16")
        y = moe(arrays.put(x))
        moe.synchronize()
        moe_reference(x, weights, 3, False).check(arrays.get(y))
    moe.close()
