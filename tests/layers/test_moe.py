"""The mixture of experts: its graph proved and simulated, and the layer itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etc_dist.errors import GraphError, RaceError
from etc_dist.ir import GraphFunction
from etc_dist.layers.moe_graph import moe_graph
from etc_dist.runtime.cpu import simulate
from etc_dist.schedule import schedule_dynamic, schedule_static
from etc_dist.verify.verify import verify
from tests.layers.reference import (
    TOLERANCE,
    Answer,
    aim,
    draw,
    draw_experts,
    moe_reference,
)
from tests.layers.test_mlp import without

NAMES = ("x", "router", "gate_up", "down")
LOADED = ("tile_expert", "tile_row", "tile_rows", "tile_first")
PLANS = {"static": schedule_static, "dynamic": schedule_dynamic}
sizes = st.fixed_dictionaries(
    {
        "tokens": st.integers(1, 50),
        "hidden": st.integers(8, 50),
        "inner": st.integers(1, 30),
    }
)


def small(experts: int = 8, top_k: int = 2, **options: Any) -> GraphFunction:
    """The graph in small tiles: of 10 rows at most."""
    tiles = {"block": 8, "tile_rows": 10, "up_columns": 8}
    tiles |= {"tile_columns": 8, "group_tokens": 4, "passes": 3, "score_tasks": 3}
    tiles |= {"combined": 8}
    return moe_graph(1, experts=experts, top_k=top_k, **{**tiles, **options})


# ------------------------------------------------------------------------ the proof


@settings(max_examples=30, deadline=None)
@given(
    dims=sizes,
    experts=st.sampled_from([8, 16, 64]),
    top_k=st.integers(1, 8),
    pairs=st.integers(1, 5),
)
def test_graph_is_proved_but_for_what_it_loads(dims, experts, top_k, pairs):
    proof = verify(schedule_static(small(experts, top_k)), dims, 2 * pairs)
    assert proof.unchecked
    for left_out in proof.unchecked:
        assert any(name in left_out for name in LOADED)


@pytest.mark.parametrize("schedule", PLANS)
@pytest.mark.parametrize("tokens", [1056, 1057])
def test_graph_is_proved_with_two_tiles_of_experts(tokens, schedule):
    dims = {"tokens": tokens, "hidden": 40, "inner": 24}
    verify(PLANS[schedule](moe_graph(1, experts=136, top_k=3)), dims, 132)


@pytest.mark.parametrize("tokens", [1, 128, 8192])
@pytest.mark.parametrize(
    ("experts", "top_k", "hidden", "inner"),
    [(128, 8, 2048, 768), (8, 2, 4096, 14336)],
    ids=["qwen3-30b-a3b", "mixtral-8x7b"],
)
def test_graph_is_proved_at_a_real_shape(tokens, experts, top_k, hidden, inner):
    dims = {"tokens": tokens, "hidden": hidden, "inner": inner}
    verify(schedule_static(moe_graph(1, experts=experts, top_k=top_k)), dims, 132)


DIMS = {"tokens": 37, "hidden": 40, "inner": 19}


def routed(graph: GraphFunction, schedule: str) -> Any:
    """The proof for five tokens that all choose experts 3 and 5: two tiles of 5 rows,
    from 0 and from 32, and all that is done to them is known."""
    rows = {"tile_expert": [3, 5], "tile_row": [0, 32], "tile_rows": [5, 5]}
    rows |= {"tile_first": [24, 40]}
    tensors = {n: [np.array([*v, *[0] * 7], np.int32)] for n, v in rows.items()}
    return verify(PLANS[schedule](graph), {**DIMS, "tokens": 5}, 4, tensors=tensors)


@pytest.mark.parametrize("schedule", PLANS)
def test_graph_is_proved_for_a_given_routing(schedule):
    assert routed(small(), schedule).unchecked == ()


@pytest.mark.parametrize("schedule", PLANS)
def test_combining_rows_that_are_not_produced_is_a_race_for_a_given_routing(schedule):
    with pytest.raises(RaceError) as caught:
        routed(without(small(), "produced", "waits", "notifies"), schedule)
    assert "combine_rows[s=0, q=0, c=0] on rank 0 reads" in caught.value.got
    assert "down_projection[s=0, r=0, j=0] on rank 0 writes" in caught.value.got
    assert "product[0:5, 0:4] on rank 0; no event orders them" in caught.value.got


def test_combining_rows_that_are_not_located_is_a_race():
    graph = without(small(), "located", "waits", "notifies")
    with pytest.raises(RaceError) as caught:
        verify(schedule_static(graph), DIMS, 4)
    assert "combine_rows[s=0, q=0, c=0] on rank 0 reads" in caught.value.got


# ------------------------------------------------------------------- the simulation


def run(graph: GraphFunction, x: Any, weights: Any, **options: Any) -> Any:
    """y of one simulated run."""
    inputs = dict(zip(NAMES, (x, *weights), strict=True))
    dims = {"tokens": len(x), "hidden": x.shape[1], "inner": weights[2].shape[2]}
    plan = PLANS[options.pop("schedule", "static")](graph)
    (out,) = simulate(plan, [inputs], dims, **options).outputs
    return out["y"]


def check(answer: Answer, y: Any, dtype: str = "bfloat16") -> None:
    answer.check(y, dtype)
    assert answer.error(y) < 1.5 * TOLERANCE[dtype]


# tokens, hidden, inner, experts, top_k
SHAPES = [
    (1, 8, 8, 8, 1),
    (1, 40, 24, 8, 8),
    (32, 64, 32, 16, 4),
    (33, 50, 19, 24, 3),
    (50, 24, 16, 64, 8),
    (3, 8, 8, 256, 16),
]


@pytest.mark.parametrize(
    ("tokens", "hidden", "inner", "experts", "top_k"), SHAPES, ids=str
)
def test_every_interleaving_gives_the_same_bits_near_fp32(
    tokens, hidden, inner, experts, top_k, rng
):
    normalize = tokens % 2 == 0
    x = draw(rng, (tokens, hidden), "bfloat16")
    weights = draw_experts(rng, experts, hidden, inner)
    graph = small(experts, top_k, normalize=normalize)
    runs = [run(graph, x, weights, seed=seed, epochs=2) for seed in range(3)]
    assert len({y.tobytes() for y in runs}) == 1
    check(moe_reference(x, weights, top_k, normalize), runs[0])


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_tiles_of_the_gpu_give_the_reference(dtype, rng):
    x = draw(rng, (600, 40), dtype)
    weights = draw_experts(rng, 8, 40, 24, dtype)
    y = run(moe_graph(1, experts=8, top_k=2, dtype=dtype), x, weights)
    check(moe_reference(x, weights, 2), y, dtype)


def zipf(rng: np.random.Generator, tokens: int, experts: int, top_k: int) -> Any:
    """Choices of which the first experts get most."""
    odds = 1 / np.arange(1, experts + 1)
    odds /= odds.sum()
    return np.array(
        [rng.choice(experts, top_k, replace=False, p=odds) for _ in range(tokens)]
    )


ROUTINGS = {
    "one expert gets all": lambda rng, n: np.full((n, 1), 5),
    "two experts get all": lambda rng, n: np.tile([6, 1], (n, 1)),
    "one expert gets none": lambda rng, n: 1 + zipf(rng, n, 7, 2),
    "first experts get most": lambda rng, n: zipf(rng, n, 8, 3),
    "all experts get the same": lambda rng, n: np.arange(2 * n).reshape(n, 2) % 8,
    "all get all": lambda rng, n: np.tile(np.arange(8), (n, 1)),
}


@pytest.mark.parametrize("schedule", PLANS)
@pytest.mark.parametrize("tokens", [1, 10, 11, 75])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_any_routing_gives_the_reference(routing, tokens, schedule, rng, seed):
    ids = ROUTINGS[routing](rng, tokens)
    x, weights = draw(rng, (tokens, 24), "bfloat16"), draw_experts(rng, 8, 24, 16)
    aim(x, weights, ids)
    graph = small(8, ids.shape[1])
    y = run(graph, x, weights, seed=seed, schedule=schedule)
    moe_reference(x, weights, ids.shape[1]).check(y)


@settings(max_examples=25, deadline=None)
@given(
    dims=sizes,
    experts=st.sampled_from([8, 16, 40]),
    top_k=st.integers(1, 8),
    normalize=st.booleans(),
    dtype=st.sampled_from(sorted(TOLERANCE)),
    workers=st.sampled_from([2, 4, 8]),
    seed=st.integers(0, 2**32 - 1),
)
def test_odd_shapes_and_equal_logits_give_the_reference(
    dims, experts, top_k, normalize, dtype, workers, seed
):
    rng = np.random.default_rng(seed)
    tokens, hidden, inner = dims.values()
    # Small integers: logits are exact, and often equal.
    x = rng.integers(-1, 2, (tokens, hidden)).astype(draw(rng, (1,), dtype).dtype)
    weights = draw_experts(rng, experts, hidden, inner, dtype)
    weights[0][...] = rng.integers(-1, 2, weights[0].shape)
    graph = small(experts, top_k, normalize=normalize, dtype=dtype)
    y = run(graph, x, weights, seed=seed, workers=workers)
    moe_reference(x, weights, top_k, normalize).check(y, dtype)


EVENTS = ("scored", "routed", "listed", "activated", "produced", "located")


@pytest.mark.parametrize("event", EVENTS)
def test_simulation_finds_a_missing_wait(event, rng):
    graph = without(small(), event, "waits")
    x, weights = draw(rng, (37, 40), "bfloat16"), draw_experts(rng, 8, 40, 19)
    with pytest.raises(GraphError):
        for seed in range(10):
            run(graph, x, weights, seed=seed, workers=8)


# ------------------------------------------------------------------------ the layer


@pytest.mark.mpi
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_layer_comes_close_to_fp32(dtype, normalize, make_moe, arrays):
    layer = make_moe(16, 72, 40, dtype=dtype, top_k=4, normalize=normalize)
    x, out, answer = layer.rows(75)
    assert layer.moe(x, out) is out
    layer.moe.synchronize()
    check(answer, arrays.get(out), dtype)


# One token, whole blocks and tiles and more; tails of hidden and inner, many passes;
# numbers of experts that fill no group or word of 32; tiles of all rows that they may
# have; tokens enough for the router to go by tiles, and to be counted in more than one
# turn.
@pytest.mark.mpi
@pytest.mark.parametrize(
    ("tokens", "experts", "hidden", "inner", "top_k"),
    [
        (1, 8, 8, 8, 1),
        (31, 8, 256, 128, 2),
        (9, 128, 1288, 392, 8),
        (33, 128, 1288, 136, 8),
        (256, 8, 72, 264, 8),
        (301, 8, 40, 24, 3),
        (600, 8, 264, 56, 1),
        (1100, 128, 136, 24, 8),
        (70, 24, 40, 24, 3),
        (70, 136, 40, 24, 5),
        (300, 128, 40, 24, 2),
        (600, 136, 40, 24, 2),
        (1100, 8, 1032, 24, 1),
        (288, 8, 328, 264, 8),
        (128, 8, 328, 264, 8),
        (1024, 128, 40, 24, 8),
        (2200, 136, 328, 24, 3),
        (4260, 8, 40, 24, 1),
    ],
    ids=str,
)
def test_layer_has_any_shape(tokens, experts, hidden, inner, top_k, make_moe, arrays):
    layer = make_moe(experts, hidden, inner, top_k=top_k)
    x, out, answer = layer.rows(tokens)
    layer.moe(x, out)
    layer.moe.synchronize()
    answer.check(arrays.get(out))


@pytest.mark.mpi
@pytest.mark.parametrize("schedule", PLANS)
@pytest.mark.parametrize("routing", ROUTINGS)
def test_layer_routes_tokens_anyhow(routing, schedule, make_moe, arrays, rng):
    ids = ROUTINGS[routing](rng, 290)
    layer = make_moe(8, 40, 24, top_k=ids.shape[1], schedule=schedule)
    x, out, answer = layer.rows(290, ids)
    layer.moe(x, out)
    layer.moe.synchronize()
    answer.check(arrays.get(out))


@pytest.mark.mpi
def test_repeated_calls_give_the_same_bits(make_moe, arrays):
    layer = make_moe(16, 72, 40, top_k=4)
    x, out, answer = layer.rows(75)
    bits = set()
    for _ in range(6):
        out = arrays.poisoned(out.shape, "bfloat16")
        layer.moe(x, out)
        layer.moe.synchronize()
        bits.add(arrays.get(out).tobytes())
    assert len(bits) == 1
    answer.check(arrays.get(out))


@pytest.mark.mpi
def test_one_program_serves_any_number_of_tokens(make_moe, arrays, compiled):
    layer = make_moe(8, 40, 24, top_k=2)
    # Up and down again, without meeting between: buffers grow, and stay right.
    calls = [layer.rows(count) for count in (3, 40, 300, 40, 1)]
    for x, out, _ in calls:
        layer.moe(x, out)
    layer.moe.synchronize()
    for _, out, answer in calls:
        answer.check(arrays.get(out))
    assert compiled == ["moe_graph"]


@pytest.mark.mpi
def test_an_output_is_made_like_x(make_moe, arrays):
    layer = make_moe(8, 40, 24, dtype="float16", top_k=2)
    x, _, answer = layer.rows(16)
    made = layer.moe(x)
    layer.moe.synchronize()
    assert (type(made), made.dtype, made.shape) == (type(x), x.dtype, x.shape)
    answer.check(arrays.get(made), "float16")


@pytest.mark.mpi
def test_no_tokens_give_no_rows(make_moe, arrays, monkeypatch):
    layer = make_moe(8, 40, 24, top_k=2)
    monkeypatch.setattr(layer.moe.program, "launch", None)
    x = arrays.put_as(np.zeros((0, 40)), "bfloat16")
    made = layer.moe(x)
    assert (type(made), made.dtype, made.shape) == (type(x), x.dtype, (0, 40))
    out = arrays.poisoned((0, 40), "bfloat16")
    assert layer.moe(x, out) is out


@pytest.mark.mpi
def test_weights_are_kept_by_reference(make_moe, arrays):
    layer = make_moe(8, 40, 24, top_k=2)
    x, out, answer = layer.rows(16)
    layer.weights[2][...] = 2 * layer.weights[2]
    layer.moe(x, out)
    layer.moe.synchronize()
    answer.check(arrays.get(out) / 2)


@pytest.mark.mpi
def test_layers_take_turns(make_moe, arrays):
    layers = [make_moe(8, 40, 24, top_k=2), make_moe(16, 24, 40, top_k=3)]
    for layer in layers * 3:
        x, out, answer = layer.rows(8)
        layer.moe(x, out)
        layer.moe.synchronize()
        answer.check(arrays.get(out))
