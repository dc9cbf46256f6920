"""The dense MLP for few rows: its graph proved and simulated, and the layer that picks
it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etc_dist.errors import ArgumentError, WorldError
from etc_dist.ir import GraphFunction
from etc_dist.layers.mlp_few_rows import FEW_ROWS, mlp_few_rows_graph
from etc_dist.schedule import schedule_static
from etc_dist.verify.verify import verify
from tests.layers.reference import TOLERANCE
from tests.layers.test_mlp import check_both_schedules, dims_of, race_without

SMALL = {"tile_columns": 16, "step": 8, "block": 8, "summed": 8, "product_tasks": 6}
DIMS = {"rows": 3, "hidden": 37, "inner": 19}
sizes = dims_of(6)


def small(world_size: int, dtype: str = "bfloat16") -> GraphFunction:
    """The graph in tiles of 8 or 16 columns, for about 6 tasks a product."""
    return mlp_few_rows_graph(world_size, dtype=dtype, **SMALL)


@pytest.mark.parametrize("world_size", range(1, 9))
@settings(max_examples=10, deadline=None)
@given(dims=sizes, pairs=st.integers(1, 5))
def test_graph_is_proved_at_odd_shapes(world_size, dims, pairs):
    proof = verify(schedule_static(small(world_size)), dims, 2 * pairs)
    assert proof.unchecked == ()


@pytest.mark.parametrize("rows", [1, 2, 3, FEW_ROWS // 8])
def test_graph_is_proved_at_real_shapes(rows):
    for hidden, inner in ((5120, 3200), (8192, 3584), (4096, 14336)):
        dims = {"rows": rows, "hidden": hidden, "inner": inner}
        verify(schedule_static(mlp_few_rows_graph(8)), dims, 132)


@pytest.mark.parametrize(
    ("event", "race"),
    [
        ("arrived", "gate_projection[s=0, j=0] on rank 0 reads and push_rows"),
        ("multiplied", "activate_partials[i=0, b=0] on rank 0 reads and"),
        ("activated", "down_projection[s=0, j=0] on rank 0 reads"),
        ("produced", "add_shares[p=1, i=0, c=0] on rank 0 reads"),
        ("returned", "add_ranks[i=0, c=0] on rank 0 reads"),
    ],
)
def test_each_event_is_needed(event, race):
    assert race in race_without(small(2), event, DIMS)


@settings(max_examples=6, deadline=None)
@given(
    world_size=st.integers(1, 8),
    dims=sizes,
    dtype=st.sampled_from(sorted(TOLERANCE)),
    seed=st.integers(0, 2**32 - 1),
)
def test_odd_shapes_give_the_same_bits_near_fp32(world_size, dims, dtype, seed):
    check_both_schedules(small(world_size, dtype), dims, dtype, seed)


# ------------------------------------------------------------------------- the layer


# Tails of hidden and inner, shares of k, one row a rank, and more than a narrow tile.
@pytest.mark.mpi
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("rows", "hidden", "inner"),
    [(1, 8, 8), (2, 296, 136), (5, 1032, 776), (16, 520, 1032), (32, 264, 40)],
)
def test_few_rows_come_close_to_fp32(rows, hidden, inner, dtype, make, arrays):
    layer = make(hidden, inner, dtype, few_rows=FEW_ROWS)
    for _ in range(2):
        x, out, answer = layer.rows(rows)
        layer.mlp(x, out)
        layer.mlp.synchronize()
        assert layer.mlp.program.plan.graph.name == "mlp_few_rows_graph"
        answer.check(arrays.get(out), dtype)


@pytest.mark.mpi
def test_both_schedules_and_repeats_give_the_same_bits(make, arrays, world):
    bits, rows = set(), FEW_ROWS // world.size
    for schedule in ("static", "dynamic"):
        layer = make(520, 264, few_rows=FEW_ROWS, schedule=schedule)
        x, out, answer = layer.rows(rows)
        for _ in range(2):
            layer.mlp(x, out)
            layer.mlp.synchronize()
            bits.add(arrays.get(out).tobytes())
        assert answer.error(arrays.get(out)) < TOLERANCE["bfloat16"]
    assert len(bits) == 1


@pytest.mark.mpi
def test_few_and_many_rows_take_turns(make, arrays, world, compiled):
    layer, most = make(264, 136, few_rows=FEW_ROWS), FEW_ROWS // world.size
    # Without meeting between.
    calls = [layer.rows(count) for count in (1, most + 1, most, 300, 2)]
    names = []
    for x, out, _ in calls:
        layer.mlp(x, out)
        names.append(layer.mlp.program.plan.graph.name)
    layer.mlp.synchronize()
    for _, out, answer in calls:
        answer.check(arrays.get(out))
    dims = {"rows": 2, "hidden": 264, "inner": 136}
    rooms = layer.mlp.program.room(dims)
    assert rooms == [{**dims, "rows": rows} for rows in range(1, most + 1)]
    few, many = "mlp_few_rows_graph", "mlp_graph"
    assert names == [few, many, few, many, few]
    assert compiled == [many, few]


@pytest.mark.mpi(min_size=2)
def test_ranks_that_would_run_other_programs_are_refused(make, arrays, world):
    layer = make(40, 24, few_rows=FEW_ROWS)
    x, out, _ = layer.rows(1 if world.rank == 0 else FEW_ROWS)
    with pytest.raises(ArgumentError, match="the ranks do not make the same call"):
        layer.mlp(x, out)
    x, out, answer = layer.rows(2)
    layer.mlp(x, out)
    layer.mlp.synchronize()
    answer.check(arrays.get(out))


@pytest.fixture
def without_room(make, monkeypatch):
    """A layer whose program for few rows has no room, and what it grows for."""
    layer = make(40, 24, few_rows=FEW_ROWS)
    x, out, _ = layer.rows(2)
    layer.mlp(x, out)
    executor, grown = layer.mlp.program._executor, []
    grow = executor.grow

    def counted(*shapes):
        grown.extend(shapes)
        grow(*shapes)

    monkeypatch.setattr(executor, "grow", counted)
    monkeypatch.setattr(executor, "needs_memory", lambda dims: not grown)
    return layer, grown


@pytest.mark.mpi
def test_a_program_without_room_makes_room_for_all_few_rows(
    without_room, arrays, world
):
    layer, grown = without_room
    for rows in (3, FEW_ROWS // world.size):
        x, out, answer = layer.rows(rows)
        layer.mlp(x, out)
        layer.mlp.synchronize()
        answer.check(arrays.get(out))
    assert [dims["rows"] for dims in grown] == [*range(1, FEW_ROWS // world.size + 1)]


@pytest.mark.mpi
def test_a_program_without_room_is_not_captured(without_room, arrays, monkeypatch):
    layer, grown = without_room
    x, out, answer = layer.rows(3)
    with monkeypatch.context() as patch:
        executor = layer.mlp.program._executor
        patch.setattr(executor, "is_capturing", lambda stream=None: True)
        with pytest.raises(WorldError, match="captured before it has room"):
            layer.mlp(x, out)
    assert not grown
    layer.mlp(x, out)
    layer.mlp.synchronize()
    answer.check(arrays.get(out))


@pytest.mark.mpi
@pytest.mark.gpu
def test_few_rows_are_captured_once_there_is_room(make, arrays, world):
    import cupy

    layer, most = make(264, 136, few_rows=FEW_ROWS), FEW_ROWS // world.size
    stream = cupy.cuda.Stream(non_blocking=True)
    calls = [layer.rows(count) for count in (2, most)]
    with stream:
        stream.begin_capture()
        with pytest.raises(WorldError, match="captured before it has room"):
            layer.mlp(*calls[0][:2])
        stream.end_capture()
    layer.mlp(*calls[0][:2])
    layer.mlp.synchronize()
    with stream:
        stream.begin_capture()
        for x, out, _ in calls:
            layer.mlp(x, out)
        graph = stream.end_capture()
    for _ in range(3):
        for _, out, _ in calls:
            out.fill(np.nan)
        cupy.cuda.runtime.deviceSynchronize()
        graph.launch(stream)
        stream.synchronize()
        for _, out, answer in calls:
            answer.check(arrays.get(out))
    # Many rows have memory of their own, which may still grow.
    x, out, answer = layer.rows(300)
    layer.mlp(x, out)
    layer.mlp.synchronize()
    answer.check(arrays.get(out))
