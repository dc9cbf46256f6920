"""The dense MLP in tiles that ranks share: its graph proved and simulated, and the
layer that picks it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etc_dist.ir import GraphFunction
from etc_dist.layers.mlp_few_rows import FEW_ROWS
from etc_dist.layers.mlp_packed_rows import (
    are_packed,
    mlp_packed_rows_graph,
    most_packed,
)
from etc_dist.schedule import schedule_static
from etc_dist.verify.verify import verify
from tests.layers.reference import TOLERANCE
from tests.layers.test_mlp import check_both_schedules, dims_of, race_without

# Three ranks' rows in two tiles, of which one has rows of two ranks.
DIMS = {"rows": 9, "hidden": 37, "inner": 19}
MANY, PACKED, FEW = "mlp_graph", "mlp_packed_rows_graph", "mlp_few_rows_graph"


def small(world_size: int, dtype: str = "bfloat16") -> GraphFunction:
    """The graph in tiles of 16."""
    return mlp_packed_rows_graph(world_size, dtype=dtype, tile_size=16, summed=16)


@pytest.mark.parametrize("world_size", [2, 3, 8])
@settings(max_examples=6, deadline=None)
@given(dims=dims_of(20), pairs=st.integers(1, 5))
def test_graph_is_proved_at_odd_shapes(world_size, dims, pairs):
    proof = verify(schedule_static(small(world_size)), dims, 2 * pairs)
    assert proof.unchecked == ()


@pytest.mark.parametrize("rows", [33, 150])
def test_graph_is_proved_at_real_shapes(rows):
    dims = {"rows": rows, "hidden": 8192, "inner": 3584}
    verify(schedule_static(mlp_packed_rows_graph(8)), dims, 132)


@pytest.mark.parametrize(
    ("event", "race"),
    [
        ("arrived", "gate_up_projection[i=0, j=0] on rank 0 reads and push_rows"),
        ("activated", "down_projection[i=0, j=0] on rank 0 reads active"),
        ("produced", "send_back[p=2, r=0] on rank 0 reads and down_projection"),
        ("returned", "send_back[p=2, r=0] on rank 0 writes and sum_ranks[r=0, c=0]"),
    ],
)
def test_each_event_is_needed(event, race):
    assert race in race_without(small(3), event, DIMS)


@settings(max_examples=6, deadline=None)
@given(
    world_size=st.integers(1, 6),
    dims=dims_of(9),
    dtype=st.sampled_from(sorted(TOLERANCE)),
    seed=st.integers(0, 2**32 - 1),
)
def test_odd_shapes_give_the_same_bits_near_fp32(world_size, dims, dtype, seed):
    check_both_schedules(small(world_size, dtype), dims, dtype, seed)


# ------------------------------------------------------------------------- the layer


# One tile, not full; tails of hidden and inner; tiles with rows of two ranks.
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("rows", "hidden", "inner"), [(2, 8, 8), (40, 296, 136), (90, 264, 520)]
)
def test_packed_rows_come_close_to_fp32(rows, hidden, inner, dtype, make, arrays):
    layer = make(hidden, inner, dtype, packed=True)
    for _ in range(2):
        x, out, answer = layer.rows(rows)
        layer.mlp(x, out)
        layer.mlp.synchronize()
        assert layer.mlp.program.plan.graph.name == PACKED
        answer.check(arrays.get(out), dtype)


@pytest.mark.mpi(min_size=2)
def test_both_schedules_and_repeats_give_the_same_bits(make, arrays):
    bits = set()
    for schedule in ("static", "dynamic"):
        layer = make(520, 264, packed=True, schedule=schedule)
        x, out, answer = layer.rows(70)
        for _ in range(2):
            layer.mlp(x, out)
            layer.mlp.synchronize()
            bits.add(arrays.get(out).tobytes())
        assert answer.error(arrays.get(out)) < TOLERANCE["bfloat16"]
    assert len(bits) == 1


@pytest.mark.mpi(min_size=2)
def test_rows_are_packed_where_that_makes_tiles_fewer(make, arrays, world, compiled):
    layer = make(40, 24, few_rows=FEW_ROWS, packed=True)
    few, half = FEW_ROWS // world.size, 256 // world.size
    # Together, all ranks' first rows fill one tile; full tiles are as many apart.
    expected = {few: FEW, few + 1: PACKED, half: PACKED, 256: MANY, 512: MANY, 1: FEW}
    for rows, name in expected.items():
        x, out, answer = layer.rows(rows)
        layer.mlp(x, out)
        assert layer.mlp.program.plan.graph.name == name
        if name == PACKED:
            room = layer.mlp.program.room({"rows": rows, "hidden": 40})
            assert room == [{"rows": most_packed(world.size), "hidden": 40}]
        layer.mlp.synchronize()
        answer.check(arrays.get(out))
    assert compiled == [MANY, PACKED, FEW]


# Four ranks' rows: two tiles of four at most, or five of eight; never nine of twelve.
@pytest.mark.parametrize("rows", [1, 128, 257, 320])
def test_tiles_are_shared_where_that_saves_more_than_a_quarter(rows):
    assert are_packed(4, rows)


@pytest.mark.parametrize("rows", [129, 192, 256, 321, 512, 513, 768])
def test_tiles_are_not_shared_where_that_saves_less(rows):
    assert not are_packed(4, rows)


@pytest.mark.parametrize("world_size", range(1, 9))
def test_no_more_rows_are_packed_than_there_is_room_for(world_size):
    packed = [r for r in range(1, 5000) if are_packed(world_size, r)]
    assert most_packed(world_size) == max(packed, default=0)


@pytest.mark.mpi
def test_one_rank_packs_nothing(one_rank, make, compiled):
    make(40, 24, packed=True)
    assert compiled == [MANY]
