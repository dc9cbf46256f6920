"""The mixture of experts over many ranks: proved, simulated, and the layer itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etc_dist.errors import RaceError
from etc_dist.ir import GraphFunction
from etc_dist.layers.moe_graph import moe_graph
from etc_dist.runtime.cpu import simulate
from etc_dist.schedule import schedule_auto, schedule_dynamic, schedule_static
from etc_dist.verify.verify import verify
from tests.layers.reference import (
    TOLERANCE,
    aim,
    draw,
    draw_experts,
    moe_reference,
    own_experts,
)
from tests.layers.test_mlp import without
from tests.layers.test_moe import LOADED, NAMES, ROUTINGS

PLANS = {"static": schedule_static, "dynamic": schedule_dynamic}
WAYS = ("tensor", "expert")


def small(world: int, parallel: str, **options: Any) -> GraphFunction:
    """The graph in small tiles: of 10 rows at most."""
    tiles = {"block": 8, "tile_rows": 10, "up_columns": 8}
    tiles |= {"tile_columns": 8, "group_tokens": 4, "passes": 3, "part_tokens": 3}
    tiles |= {"push_tasks": 8, "score_tasks": 1}
    options = {"experts": 8, "top_k": 2, **tiles, **options}
    return moe_graph(world, parallel=parallel, **options)


def sized(parallel: str, tokens: int, hidden: int, inner: int) -> dict[str, int]:
    """The graph's dims where a rank's result has so many tokens."""
    name = "shard" if parallel == "tensor" else "tokens"
    return {name: tokens, "hidden": hidden, "inner": inner}


# ------------------------------------------------------------------------ the proof


@pytest.mark.parametrize("schedule", PLANS)
@pytest.mark.parametrize("parallel", WAYS)
@settings(max_examples=10, deadline=None)
@given(
    world=st.integers(2, 8),
    tokens=st.integers(1, 20),
    hidden=st.integers(8, 50),
    inner=st.integers(1, 30),
    top_k=st.integers(1, 8),
    pairs=st.integers(1, 5),
)
def test_graph_is_proved_but_for_what_it_loads(
    parallel, schedule, world, tokens, hidden, inner, top_k, pairs
):
    graph = small(world, parallel, experts=8 * world, top_k=top_k)
    dims = sized(parallel, tokens, hidden, inner)
    proof = verify(PLANS[schedule](graph), dims, 2 * pairs)
    assert proof.unchecked
    for left_out in proof.unchecked:
        assert any(name in left_out for name in LOADED)


@pytest.mark.parametrize("parallel", WAYS)
@pytest.mark.parametrize("tokens", [1, 2048])
@pytest.mark.parametrize(
    ("experts", "top_k", "hidden", "inner"),
    [(128, 8, 2048, 768), (8, 2, 4096, 14336)],
    ids=["qwen3-30b-a3b", "mixtral-8x7b"],
)
def test_graph_is_proved_at_a_real_shape(
    parallel, tokens, experts, top_k, hidden, inner
):
    graph = moe_graph(4, experts=experts, top_k=top_k, parallel=parallel)
    inner = inner // 4 if parallel == "tensor" else inner
    verify(schedule_static(graph), sized(parallel, tokens, hidden, inner), 132)


@pytest.mark.parametrize("parallel", WAYS)
def test_a_graph_that_loads_is_dynamic_if_it_may_choose(parallel):
    assert schedule_auto(small(2, parallel)).schedule == "dynamic"


LINKS = {
    "tensor": ("located", "returned"),
    "expert": ("routed", "shared", "located", "returned"),
}


@pytest.mark.parametrize(
    ("parallel", "event"), [(way, event) for way in WAYS for event in LINKS[way]]
)
def test_a_missing_event_is_a_race(parallel, event):
    graph = without(small(2, parallel), event, "waits", "notifies")
    with pytest.raises(RaceError):
        verify(schedule_static(graph), sized(parallel, 19, 40, 19), 8)


def planned(graph: GraphFunction, dims: dict[str, int], rows: int) -> dict[str, Any]:
    """The tiles of two ranks that have one expert each, the r-th, of so many rows."""
    env = graph.environment(dims, 0)
    tables = {}
    for name in LOADED:
        (count,) = (int(n.evaluate(env)) for n in graph.tensor(name).shape)
        tables[name] = np.zeros((2, count), np.int32)
    for rank, number in ((0, 0), (1, 1)):
        tables["tile_expert"][rank, 0] = number
        tables["tile_rows"][rank, 0] = rows
    return {name: list(table) for name, table in tables.items()}


def test_all_is_proved_for_given_tiles_and_rows_that_do_not_arrive_are_a_race():
    graph, dims = small(2, "expert"), sized("expert", 4, 40, 19)
    tensors = planned(graph, dims, rows=8)
    proof = verify(schedule_static(graph), dims, 4, tensors=tensors)
    assert proof.unchecked == ()
    for event in ("arrived", "listed", "activated", "produced"):
        lacking = without(graph, event, "waits", "notifies")
        with pytest.raises(RaceError):
            verify(schedule_static(lacking), dims, 8, tensors=tensors)


# ------------------------------------------------------------------- the simulation


def run(
    world: int,
    parallel: str,
    xs: list[Any],
    weights: Any,
    schedule: str = "static",
    graph: dict[str, Any] | None = None,
    **options: Any,
) -> list[Any]:
    """y of each rank, of one simulated run with these tokens of each rank."""
    shares = [own_experts(weights, parallel, rank, world) for rank in range(world)]
    seen = [np.concatenate(xs)] * world if parallel == "tensor" else xs
    inputs = [
        dict(zip(NAMES, (x, *share), strict=True))
        for x, share in zip(seen, shares, strict=True)
    ]
    dims = sized(parallel, len(xs[0]), xs[0].shape[1], shares[0][2].shape[2])
    plan = PLANS[schedule](
        small(world, parallel, experts=len(weights[0]), **(graph or {}))
    )
    return [out["y"] for out in simulate(plan, inputs, dims, **options).outputs]


@pytest.mark.parametrize("parallel", WAYS)
@pytest.mark.parametrize(
    ("world", "experts", "tokens", "hidden", "inner", "top_k", "normalize"),
    [
        (2, 16, 8, 40, 12, 4, False),
        (3, 24, 9, 18, 12, 3, True),
        (4, 24, 1, 8, 24, 1, True),
        (4, 8, 5, 16, 12, 3, False),
    ],
    ids=str,
)
def test_every_interleaving_gives_the_same_bits_near_fp32(
    parallel, world, experts, tokens, hidden, inner, top_k, normalize, rng
):
    xs = [draw(rng, (tokens, hidden), "bfloat16") for _ in range(world)]
    weights = draw_experts(rng, experts, hidden, inner)
    options = {"top_k": top_k, "normalize": normalize}
    runs = [
        run(world, parallel, xs, weights, graph=options, seed=seed, epochs=2)
        for seed in range(3)
    ]
    for rank, x in enumerate(xs):
        assert len({ys[rank].tobytes() for ys in runs}) == 1
        answer = moe_reference(x, weights, top_k, normalize)
        answer.check(runs[0][rank])
        assert answer.error(runs[0][rank]) < 2 * TOLERANCE["bfloat16"]


@pytest.mark.parametrize(("world", "schedule"), [(2, "dynamic"), (4, "static")])
@pytest.mark.parametrize("parallel", WAYS)
@pytest.mark.parametrize("tokens", [1, 9])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_any_routing_gives_the_reference(
    routing, tokens, world, parallel, schedule, rng, seed
):
    ids = ROUTINGS[routing](rng, world * tokens)
    x, weights = draw(rng, (len(ids), 24), "bfloat16"), draw_experts(rng, 8, 24, 16)
    aim(x, weights, ids)
    top_k = ids.shape[1]
    ys = run(
        world,
        parallel,
        np.split(x, world),
        weights,
        schedule,
        {"top_k": top_k},
        seed=seed,
    )
    moe_reference(x, weights, top_k).check(np.concatenate(ys))


@pytest.mark.parametrize("parallel", WAYS)
def test_tiles_of_the_gpu_give_the_reference(parallel, rng):
    xs = [draw(rng, (110, 40), "bfloat16") for _ in range(2)]
    weights = draw_experts(rng, 8, 40, 24)
    plain = {
        "block": 32,
        "tile_rows": 288,
        "up_columns": 256,
        "tile_columns": 512,
        "passes": 2,
        "part_tokens": 16,
    }
    ys = run(2, parallel, xs, weights, graph=plain)
    for x, y in zip(xs, ys, strict=True):
        moe_reference(x, weights, 2).check(y)


# ------------------------------------------------------------------------ the layer


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("dtype", "schedule"), [("bfloat16", "static"), ("float16", "dynamic")]
)
@pytest.mark.parametrize("parallel", WAYS)
def test_layer_comes_close_to_fp32(parallel, dtype, schedule, make_parallel, arrays):
    layer = make_parallel(
        16, 72, 192, dtype=dtype, top_k=4, parallel=parallel, schedule=schedule
    )
    assert layer.moe.program.plan.schedule == schedule
    x, out, answer = layer.rows(43)
    assert layer.moe(x, out) is out
    layer.moe.synchronize()
    answer.check(arrays.get(out), dtype)
    assert answer.error(arrays.get(out)) < 2 * TOLERANCE[dtype]


# One token a rank, whole blocks and tiles and more; tails of hidden and inner.
@pytest.mark.mpi
@pytest.mark.parametrize("parallel", WAYS)
@pytest.mark.parametrize(
    ("tokens", "experts", "hidden", "inner", "top_k"),
    [
        (1, 8, 8, 64, 1),
        (31, 8, 256, 128, 2),
        (33, 128, 328, 64, 8),
        (160, 8, 72, 320, 8),
        (269, 16, 40, 64, 3),
        (530, 40, 264, 64, 1),
    ],
    ids=str,
)
def test_layer_has_any_shape(
    tokens, experts, hidden, inner, top_k, parallel, make_parallel, arrays
):
    layer = make_parallel(experts, hidden, inner, top_k=top_k, parallel=parallel)
    x, out, answer = layer.rows(tokens)
    layer.moe(x, out)
    layer.moe.synchronize()
    answer.check(arrays.get(out))


@pytest.mark.mpi
@pytest.mark.parametrize("parallel", WAYS)
@pytest.mark.parametrize("routing", ROUTINGS)
def test_layer_routes_tokens_anyhow(
    routing, parallel, make_parallel, arrays, world, rng
):
    ids = ROUTINGS[routing](rng, 33 * world.size)
    layer = make_parallel(8, 40, 64, top_k=ids.shape[1], parallel=parallel)
    x, out, answer = layer.rows(33, ids)
    layer.moe(x, out)
    layer.moe.synchronize()
    answer.check(arrays.get(out))


@pytest.mark.mpi
@pytest.mark.parametrize("parallel", WAYS)
def test_repeated_calls_give_the_same_bits(parallel, make_parallel, arrays):
    layer = make_parallel(16, 72, 64, top_k=4, parallel=parallel)
    x, out, answer = layer.rows(35)
    bits = set()
    for _ in range(3):
        out = arrays.poisoned(out.shape, "bfloat16")
        layer.moe(x, out)
        layer.moe.synchronize()
        bits.add(arrays.get(out).tobytes())
    assert len(bits) == 1
    answer.check(arrays.get(out))


@pytest.mark.mpi
@pytest.mark.parametrize("parallel", WAYS)
def test_one_program_serves_any_number_of_tokens(parallel, make_parallel, arrays):
    layer = make_parallel(8, 40, 64, top_k=2, parallel=parallel)
    # Up and down again, without meeting between: buffers grow, and stay right.
    calls = [layer.rows(count) for count in (3, 40, 130, 40, 1)]
    for x, out, _ in calls:
        layer.moe(x, out)
    layer.moe.synchronize()
    for _, out, answer in calls:
        answer.check(arrays.get(out))


@pytest.mark.mpi
@pytest.mark.parametrize("parallel", WAYS)
def test_an_output_is_made_like_x(parallel, make_parallel, arrays):
    layer = make_parallel(8, 40, 64, dtype="float16", top_k=2, parallel=parallel)
    x, out, answer = layer.rows(16)
    made = layer.moe(x)
    layer.moe.synchronize()
    assert (type(made), made.dtype, made.shape) == (type(x), x.dtype, out.shape)
    answer.check(arrays.get(made), "float16")


@pytest.mark.mpi
@pytest.mark.parametrize("parallel", WAYS)
def test_no_tokens_give_no_rows(parallel, make_parallel, arrays, monkeypatch):
    layer = make_parallel(8, 40, 64, top_k=2, parallel=parallel)
    monkeypatch.setattr(layer.moe.program, "launch", None)
    x = arrays.put_as(np.zeros((0, 40)), "bfloat16")
    made = layer.moe(x)
    assert (type(made), made.dtype, made.shape) == (type(x), x.dtype, (0, 40))


@pytest.mark.mpi
def test_layers_of_all_ways_take_turns(make_parallel, arrays):
    layers = [make_parallel(8, 40, 64, top_k=2, parallel=way) for way in WAYS]
    for layer in layers * 3:
        x, out, answer = layer.rows(8)
        layer.moe(x, out)
        layer.moe.synchronize()
        answer.check(arrays.get(out))
