"""The dense MLP: its graph proved and simulated, and the layer on real ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etc_dist.errors import GraphError, RaceError
from etc_dist.ir import GraphFunction
from etc_dist.layers.mlp import MLP, mlp_graph
from etc_dist.runtime.cpu import simulate
from etc_dist.schedule import schedule_dynamic, schedule_static
from etc_dist.verify.verify import verify
from tests.layers.reference import (
    TOLERANCE,
    draw,
    draw_weights,
    reference,
)

NAMES = ("x", "gate", "up", "down")


def dims_of(most_rows: int) -> st.SearchStrategy[dict[str, int]]:
    """Odd sizes, of at most so many rows a rank."""
    most = {"rows": most_rows, "hidden": 50, "inner": 50}
    return st.fixed_dictionaries({k: st.integers(1, n) for k, n in most.items()})


sizes = dims_of(40)


def small(world_size: int, **options: Any) -> GraphFunction:
    """The graph in tiles of 16, an activation tile being 8 wide."""
    tiles = {"tile_size": 16, "piece": (8, 8), "packet_bytes": 64}
    return mlp_graph(world_size, **tiles, **options)


# ------------------------------------------------------------------------ the proof


@pytest.mark.parametrize("world_size", range(1, 9))
@settings(max_examples=10, deadline=None)
@given(dims=sizes, pairs=st.integers(1, 5))
def test_graph_is_proved_at_odd_shapes(world_size, dims, pairs):
    proof = verify(schedule_static(small(world_size)), dims, 2 * pairs)
    assert proof.unchecked == ()


@pytest.mark.parametrize("world_size", [1, 4, 8])
def test_graph_is_proved_at_a_real_shape(world_size):
    dims = {"rows": 1024, "hidden": 8192, "inner": 28672 // world_size}
    verify(schedule_static(mlp_graph(world_size)), dims, 132)


def without(graph: GraphFunction, event: str, *verbs: str) -> GraphFunction:
    """`graph` without the waits or notifications, or both, of one event tensor."""

    def kept(refs: Any) -> Any:
        return tuple(ref for ref in refs if ref.events.name != event)

    calls = (replace(c, **{v: kept(getattr(c, v)) for v in verbs}) for c in graph.calls)
    return replace(graph, calls=tuple(calls))


def race_without(graph: GraphFunction, event: str, dims: dict[str, int]) -> str:
    """The races of `graph` without an event tensor, as the proof words them."""
    with pytest.raises(RaceError) as caught:
        verify(schedule_static(without(graph, event, "waits", "notifies")), dims, 4)
    return caught.value.got


DIMS = {"rows": 20, "hidden": 37, "inner": 19}


def refused(graph: GraphFunction) -> GraphError:
    with pytest.raises(GraphError) as caught:
        verify(schedule_static(graph), DIMS, 4)
    return caught.value


def test_down_projection_that_does_not_wait_is_found():
    error = refused(without(small(2), "activated", "waits"))
    for race in (
        "gate_up_own[i=0, j=0] on rank 0 writes and down_projection[d=0, i=0, j=0]",
        "gate_up_peer[p=0, i=0, j=0] on rank 0 writes and down_projection[d=1, i=0",
        "activated[0, 0] on rank 0 is notified 3 times, and no task waits for it",
    ):
        assert race in error.got


def test_activations_without_their_event_are_a_race():
    error = refused(without(small(2), "activated", "waits", "notifies"))
    assert isinstance(error, RaceError)
    assert "down_projection[d=0, i=0, j=0] on rank 0 reads active[0:1," in error.got


def test_product_of_rows_that_have_not_come_is_a_race():
    error = refused(without(small(2), "arrived", "waits", "notifies"))
    assert isinstance(error, RaceError)
    assert "gate_up_peer[p=0, i=0, j=0] on rank 0 reads and push_rows" in error.got


# ------------------------------------------------------------------- the simulation


def inputs(rng, world_size, dims, dtype="bfloat16"):
    """Inputs by rank, and what each rank must get."""
    rows, hidden, inner = (dims[name] for name in ("rows", "hidden", "inner"))
    xs = [draw(rng, (rows, hidden), dtype) for _ in range(world_size)]
    shares = [draw_weights(rng, hidden, inner, dtype) for _ in range(world_size)]
    ranks = zip(xs, shares, strict=True)
    by_rank = [dict(zip(NAMES, (x, *share), strict=True)) for x, share in ranks]
    return by_rank, reference(xs, shares)


def check_both_schedules(
    graph: GraphFunction, dims: dict[str, int], dtype: str, seed: int
) -> None:
    """Both schedules give the same bits on every rank, near fp32."""
    rng = np.random.default_rng(seed)
    by_rank, answers = inputs(rng, graph.world_size, dims, dtype)
    plans = schedule_static(graph), schedule_dynamic(graph)
    runs = [simulate(p, by_rank, dims, seed=seed, epochs=2).outputs for p in plans]
    for rank, answer in enumerate(answers):
        assert len({run[rank]["y"].tobytes() for run in runs}) == 1
        answer.check(runs[0][rank]["y"], dtype)


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_every_interleaving_gives_the_same_bits_near_fp32(world_size, rng):
    plan = schedule_static(small(world_size))
    by_rank, answers = inputs(rng, world_size, DIMS)
    runs = [simulate(plan, by_rank, DIMS, seed=s, epochs=2).outputs for s in range(3)]
    for rank in range(world_size):
        assert len({run[rank]["y"].tobytes() for run in runs}) == 1
        assert answers[rank].error(runs[0][rank]["y"]) < TOLERANCE["bfloat16"]


@settings(max_examples=12, deadline=None)
@given(
    world_size=st.integers(1, 8),
    dims=sizes,
    dtype=st.sampled_from(sorted(TOLERANCE)),
    seed=st.integers(0, 2**32 - 1),
)
def test_odd_shapes_give_the_reference(world_size, dims, dtype, seed):
    plan = schedule_static(small(world_size, dtype=dtype))
    rng = np.random.default_rng(seed)
    by_rank, answers = inputs(rng, world_size, dims, dtype)
    run = simulate(plan, by_rank, dims, seed=seed)
    for answer, out in zip(answers, run.outputs, strict=True):
        answer.check(out["y"], dtype)


def test_simulation_finds_the_missing_wait(rng):
    plan = schedule_static(without(small(2), "activated", "waits"))
    by_rank, _ = inputs(rng, 2, DIMS)
    # With fewer workers, the cluster that reads a tile is the one that wrote it.
    with pytest.raises(RaceError, match="down_projection"):
        simulate(plan, by_rank, DIMS, workers=8)


# ------------------------------------------------------------------------- the layer


@pytest.mark.mpi
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_layer_comes_close_to_fp32(dtype, make, arrays):
    layer = make(296, 136, dtype)
    x, out, answer = layer.rows(48)
    assert layer.mlp(x, out) is out
    layer.mlp.synchronize()
    assert answer.error(arrays.get(out)) < TOLERANCE[dtype]


# Less than a tile, whole tiles, and tails of rows a rank, hidden and inner.
@pytest.mark.mpi
@pytest.mark.parametrize(
    ("rows", "hidden", "inner"),
    [(1, 8, 8), (24, 256, 128), (256, 264, 8), (40, 72, 520), (264, 40, 136)],
)
def test_layer_has_any_shape(rows, hidden, inner, make, arrays):
    layer = make(hidden, inner)
    x, out, answer = layer.rows(rows)
    layer.mlp(x, out)
    layer.mlp.synchronize()
    answer.check(arrays.get(out))


@pytest.mark.mpi
def test_large_gates_make_the_result_exact(world, arrays):
    """silu(32) is 32 and silu(0) is 0, so that a row of x that picks one column gives
    small integers: a row that came from elsewhere would show."""
    rows, hidden, inner = 5, 40, 24
    rngs = [np.random.default_rng(rank) for rank in range(world.size)]
    shares = [
        (
            32 * rng.integers(0, 2, (inner, hidden)),
            rng.integers(-1, 2, (inner, hidden)),
            rng.integers(-1, 2, (hidden, inner)),
        )
        for rng in rngs
    ]
    picked = world.rank * rows + np.arange(rows)
    expected = sum((gate * up).T[picked % hidden] @ down.T for gate, up, down in shares)
    weights = [arrays.put_as(weight, "bfloat16") for weight in shares[world.rank]]
    mlp = MLP(*weights, world=world)
    out = mlp(arrays.put_as(np.eye(hidden)[picked % hidden], "bfloat16"))
    mlp.synchronize()
    np.testing.assert_array_equal(arrays.get(out), expected)
    mlp.close()


@pytest.mark.mpi
def test_repeated_calls_give_the_same_bits(make, arrays):
    layer = make(264, 200)
    x, out, answer = layer.rows(72)
    bits = set()
    for _ in range(6):
        out = arrays.poisoned(out.shape, "bfloat16")
        layer.mlp(x, out)
        layer.mlp.synchronize()
        bits.add(arrays.get(out).tobytes())
    assert len(bits) == 1
    assert answer.error(arrays.get(out)) < TOLERANCE["bfloat16"]


@pytest.mark.mpi
def test_one_program_serves_any_number_of_rows(make, arrays, compiled):
    layer = make(264, 136)
    # Up and down again, without meeting between: buffers grow, and stay right.
    calls = [layer.rows(count) for count in (8, 40, 264, 40, 8)]
    for x, out, _ in calls:
        layer.mlp(x, out)
    layer.mlp.synchronize()
    for _, out, answer in calls:
        assert answer.error(arrays.get(out)) < TOLERANCE["bfloat16"]
    assert compiled == ["mlp_graph"]


@pytest.mark.mpi
def test_an_output_is_made_like_x(make, arrays):
    layer = make(40, 24, "float16")
    x, _, answer = layer.rows(16)
    made = layer.mlp(x)
    layer.mlp.synchronize()
    assert (type(made), made.dtype, made.shape) == (type(x), x.dtype, x.shape)
    answer.check(arrays.get(made), "float16")


@pytest.mark.mpi
def test_weights_are_kept_by_reference(make, arrays):
    layer = make(40, 24)
    x, out, answer = layer.rows(16)
    layer.weights[2][...] = 2 * layer.weights[2]
    layer.mlp(x, out)
    layer.mlp.synchronize()
    answer.check(arrays.get(out) / 2)


@pytest.mark.mpi
def test_layers_take_turns(make, arrays):
    layers = [make(40, 24), make(24, 40)]
    for layer in layers * 3:
        x, out, answer = layer.rows(8)
        layer.mlp(x, out)
        layer.mlp.synchronize()
        answer.check(arrays.get(out))


@pytest.mark.mpi
def test_dynamic_schedule_gives_the_same_bits(make, arrays):
    shapes = [(48, 296, 136), (300, 264, 200)]
    for rows, hidden, inner in shapes:
        bits = set()
        for schedule in ("static", "dynamic"):
            layer = make(hidden, inner, schedule=schedule)
            assert layer.mlp.program.plan.schedule == schedule
            x, out, answer = layer.rows(rows)
            for _ in range(2):
                layer.mlp(x, out)
                layer.mlp.synchronize()
                bits.add(arrays.get(out).tobytes())
            assert answer.error(arrays.get(out)) < TOLERANCE["bfloat16"]
        assert len(bits) == 1
