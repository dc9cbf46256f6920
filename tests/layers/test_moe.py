"""The mixture of experts: equal logits, and which of its programs serves which
tokens."""

from __future__ import annotations

import numpy as np
import pytest

from etc_dist.emulate import Emulator
from etc_dist.layers.moe import MoE
from etc_dist.layers.moe_few_tokens import (
    FEW_TOKENS,
    PREFETCH_BYTES,
    moe_few_tokens_graph,
    most_tokens,
)
from etc_dist.layers.moe_graph import moe_graph
from tests.layers.reference import draw, draw_experts, moe_reference

FEW, MANY = "moe_few_tokens_graph", "moe_graph"


def check_both_programs(weights, world, arrays, draw_rows, top_k, **options):
    """Calls with few and then with many tokens."""
    put = [arrays.put(weight) for weight in weights]
    moe = MoE(*put, top_k=top_k, world=world, **options)
    for tokens, name in ((2, FEW), (FEW_TOKENS + 3, MANY)):
        x = draw_rows((tokens, 40)).astype(weights[0].dtype)
        y = moe(arrays.put(x))
        moe.synchronize()
        moe_reference(x, weights, top_k, **options).check(arrays.get(y))
        assert moe.program.plan.graph.name == name
    moe.close()


@pytest.mark.mpi(ranks=[1])
@pytest.mark.parametrize("experts", [136, 256])
def test_of_equal_logits_the_lower_expert_wins(experts, one_rank, arrays, rng):
    weights = draw_experts(rng, experts, 40, 24)
    weights[0][...] = rng.integers(-1, 2, weights[0].shape)
    integers = lambda shape: rng.integers(-1, 2, shape)  # noqa: E731
    check_both_programs(weights, one_rank, arrays, integers, 16)


@pytest.mark.mpi(ranks=[1])
def test_both_programs_route_as_the_arguments_say(one_rank, arrays, rng):
    weights = draw_experts(rng, 8, 40, 24)
    normal = lambda shape: draw(rng, shape, "bfloat16")  # noqa: E731
    check_both_programs(weights, one_rank, arrays, normal, 3, normalize=False)


@pytest.mark.mpi(ranks=[1])
def test_few_and_many_tokens_take_turns(make, arrays, compiled):
    layer = make("moe few tokens", 40, 24)
    # Without synchronising in between.
    calls = [layer.rows(count) for count in (1, FEW_TOKENS + 1, FEW_TOKENS, 300, 2)]
    names = []
    for x, out, _ in calls:
        layer.layer(x, out)
        names.append(layer.program)
    layer.layer.synchronize()
    for _, out, answer in calls:
        answer.check(arrays.get(out))
    assert names == [FEW, MANY, FEW, MANY, FEW]
    assert compiled == [MANY, FEW]
    hints = layer.layer.program._capacity_hint({"tokens": 2, "hidden": 40, "inner": 24})
    assert [dims["tokens"] for dims in hints] == [*range(1, FEW_TOKENS + 1)]


def prefetched(name: str, tokens: int, hidden: int, inner: int) -> list[int]:
    """The rows of down that the tasks of a matmul prefetch, of all tasks."""
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
def test_of_one_token_all_rows_of_down_are_prefetched_once(hidden, name):
    fits = PREFETCH_BYTES // (2 * 2 * hidden)
    assert (
        prefetched(name, 1, hidden, 24)
        == prefetched(name, 1, hidden, fits)
        == [*range(hidden)]
    )
    assert (
        prefetched(name, 1, hidden, fits + 1) == prefetched(name, 2, hidden, 24) == []
    )


def test_few_tokens_are_those_that_read_little():
    assert most_tokens(8, 2048, 768) == 4  # qwen3-30b-a3b
    assert most_tokens(2, 4096, 14336) == 0  # mixtral-8x7b
    assert most_tokens(2, 40, 24) == FEW_TOKENS


@pytest.mark.mpi(ranks=[1])
def test_a_layer_of_large_experts_has_one_program(make, monkeypatch):
    read = 2 * 3 * 40 * 24 * 2
    for tokens, name in ((1, FEW), (0, MANY)):
        limit = read * (tokens + 1) - 1
        monkeypatch.setattr("etc_dist.layers.moe_few_tokens.FEW_BYTES", limit)
        layer = make("moe few tokens", 40, 24)
        for count in (2, 1):
            layer.check(count)
        assert layer.program == name


@pytest.mark.mpi(ranks=[1])
def test_logits_may_be_added_in_one_order_for_any_number_of_tokens(make):
    layer = make("moe few tokens", 40, 24, experts=128, deterministic="batch")
    for count in (1, 1100):  # so many would have logits in tiles
        layer.check(count)
        assert layer.program == MANY
    calls = layer.layer.program.plan.graph.calls
    assert "score_experts" in {call.name for call in calls}
    assert "score_tiles" not in {call.name for call in calls}


def test_a_token_has_the_same_bits_beside_any_others(rng):
    """In the CUDA bodies, where neighbouring rows share instructions."""
    dims = {"tokens": 32, "hidden": 72, "inner": 72}
    options = {"experts": 8, "top_k": 8, "dtype": "float16", "tiles_logits": False}
    emulator = Emulator(moe_graph(1, packs=True, **options))
    weights = draw_experts(rng, 8, dims["hidden"], dims["inner"], "float16")
    given = dict(zip(("router", "gate_up", "down"), weights, strict=True))
    x = draw(rng, (dims["tokens"], dims["hidden"]), "float16")
    others = x.copy()
    others[1::2] = draw(rng, (len(x) // 2, dims["hidden"]), "float16")
    first, second = (
        emulator.run([{"x": a, **given}], dims)[0]["y"] for a in (x, others)
    )
    np.testing.assert_array_equal(first[::2], second[::2])
    assert (first[1::2] != second[1::2]).any()
