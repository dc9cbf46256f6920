"""The dense MLP: exact results, and which of its programs serves which rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from etc_dist.errors import ArgumentError, WorldError
from etc_dist.layers.mlp import MLP
from etc_dist.layers.mlp_policy import choose_tiles
from etc_dist.layers.mlp_tiles import mlp_tiles_graph
from etc_dist.ops.few_rows import MOST_ROWS, capacity_dims
from etc_dist.ops.tile_model import FAMILY, Tiling, dims_of
from etc_dist.ops.tuning import default_tuning
from etc_dist.runtime.memory_plan import Capacity, plan_memory
from etc_dist.schedule.plan import Choice
from tests.conftest import some_of
from tests.layers.programs import SCHEDULES

MANY, TILES = "mlp_graph", "mlp_tiles_graph"
GATED = [number for number, shape in enumerate(FAMILY) if shape.may_be_gated]


@pytest.mark.mpi(ranks=[1, 4])
def test_large_gates_make_the_result_exact(world, arrays):
    """silu(32) is 32 and silu(0) is 0, so that a row of x with a single 1 selects one
    column, and gives small integers, which differ between rows."""
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


@pytest.mark.mpi(ranks=[2])
def test_gathered_and_many_rows_take_turns(make, world, compiled):
    layer, most = make("mlp", 264, 136, most_gathered=64), 64 // world.size
    names = layer.check_turns([1, most + 1, most, 300, 2])
    assert names == [TILES, MANY, TILES, MANY, TILES]
    assert compiled == [MANY, TILES]


@pytest.mark.mpi(ranks=[1])
def test_one_rank_has_one_program(one_rank, make, compiled):
    layer = make("mlp", 40, 24, most_gathered=64)
    layer.check(65)
    assert compiled == [TILES]
    text = layer.layer.show(rows=65)
    assert "us predicted for 65 x 24 x 40, " in text
    assert "us predicted for 65 x 40 x 24, " in text


@pytest.mark.mpi
@pytest.mark.parametrize("first", some_of(range(4), 4))
def test_any_tiles_give_the_result(first, make, monkeypatch):
    """Tails of rows, hidden and inner; k of the last column of tiles whole or divided.
    One program has each fourth of the tiles, at as many numbers of rows."""
    tilings: list[tuple[str, Tiling]] = []

    def choose(*_: Any, **options: Any) -> list[Choice]:
        dims = {
            dim: value
            for name, tiling in tilings
            for dim, value in dims_of(tiling, name).items()
        }
        return [Choice(dim, value, list) for dim, value in dims.items()]

    monkeypatch.setattr("etc_dist.layers.mlp.choose_tiles", choose)
    layer = make("mlp", 328, 264)
    for number in GATED[first::4]:
        tilings.clear()
        for name, shape_idx in (
            ("gate_up_", number),
            ("down_", (number + number % 3) % len(FAMILY)),
        ):
            split = number % 2 * (FAMILY[shape_idx].depth < 264)
            columns = FAMILY[shape_idx].columns
            tilings.append((name, Tiling(shape_idx, columns, split, 1 + split)))
        layer.check((300 + number) // layer.layer.world.size)


# After calls whose tiles are large, others have more tasks.
@pytest.mark.parametrize(("world_size", "first"), [(1, 514), (4, 97)])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("step", [19, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_memory_is_for_any_number_of_gathered_rows(schedule, world_size, first, step):
    plan = SCHEDULES[schedule](mlp_tiles_graph(world_size))
    most, capacity = MOST_ROWS // world_size, Capacity()

    def of(rows: int) -> dict[str, int]:
        dims = {"rows": rows, "hidden": 5120, "inner": 25600 // world_size}
        choices = choose_tiles(dims, world_size, 132, FAMILY, tuning=default_tuning())
        return dims | {choice.dim: choice.value for choice in choices}

    names = "gate_up_", "down_"
    for dims in capacity_dims(of(first), most, FAMILY, 132, world_size, names):
        capacity = capacity.grown(plan_memory(plan, dims))
    calls = [plan_memory(plan, of(rows)) for rows in range(1, most + 1, step)]
    assert all(capacity.holds(call) for call in calls)


@pytest.mark.mpi(ranks=[2])
def test_ranks_that_would_run_other_programs_are_refused(make, world):
    layer = make("mlp", 40, 24, most_gathered=64)
    x, out, _ = layer.rows(1 if world.rank == 0 else 64)
    with pytest.raises(ArgumentError, match="the ranks do not make the same call"):
        layer.layer(x, out)
    layer.check(2)


@pytest.fixture
def growing(make, monkeypatch):
    """A layer whose program of tiles needs memory, and the shapes it requests."""
    layer = make("mlp", 40, 24, most_gathered=64)
    layer.check(2)
    program, grown = layer.layer.program, []
    executor, hint = program._executor, program._capacity_hint
    prepare = executor.prepare

    def recorded(dims):
        grown.extend(hint(dims))
        return hint(dims)

    monkeypatch.setattr(program, "_capacity_hint", recorded)
    monkeypatch.setattr(
        executor, "prepare", lambda *call: prepare(*call) if grown else None
    )
    return layer, grown


@pytest.mark.mpi
def test_a_program_that_grows_allocates_for_all_gathered_rows(growing, world):
    layer, grown = growing
    for rows in (3, 64 // world.size):
        layer.check(rows)
    assert {dims["rows"] for dims in grown} == {64 // world.size}


@pytest.mark.mpi
def test_a_program_that_grows_is_not_captured(growing, monkeypatch):
    layer, grown = growing
    x, out, _ = layer.rows(3)
    with monkeypatch.context() as patch:
        patch.setattr("etc_dist.program.is_capturing", lambda *_: True)
        with pytest.raises(WorldError, match="captured before it has memory"):
            layer.layer(x, out)
    assert not grown
    layer.check(3)


@pytest.mark.mpi
@pytest.mark.gpu
def test_gathered_rows_are_captured_once_there_is_room(make, arrays, world):
    import cupy

    layer, most = make("mlp", 264, 136, most_gathered=64), 64 // world.size
    stream = cupy.cuda.Stream(non_blocking=True)
    calls = [layer.rows(count) for count in (2, most)]
    with stream:
        stream.begin_capture()
        with pytest.raises(WorldError, match="captured before it has memory"):
            layer.layer(*calls[0][:2])
        stream.end_capture()
    layer.layer(*calls[0][:2])
    layer.layer.synchronize()
    with stream:
        stream.begin_capture()
        for x, out, _ in calls:
            layer.layer(x, out)
        graph = stream.end_capture()
    for _ in range(3):
        layer.check(300)  # more rows need more memory
        for _, out, _ in calls:
            out.fill(np.nan)
        cupy.cuda.runtime.deviceSynchronize()
        graph.launch(stream)
        stream.synchronize()
        for _, out, answer in calls:
            answer.check(arrays.get(out))
