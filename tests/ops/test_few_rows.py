"""The collectives with few rows: which they are, and the program that serves them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from etc_dist import AllGatherMatmul, MatmulReduceScatter
from etc_dist.errors import WorldError
from etc_dist.functions.tile_shape import TileShape, shapes_for
from etc_dist.ops.all_gather_matmul import gathered_matmul_graph
from etc_dist.ops.few_rows import (
    MOST_RETURNED,
    MOST_ROWS,
    capacity_dims,
    has_few_rows,
    with_few_rows,
)
from etc_dist.ops.matmul_reduce_scatter import returned_matmul_graph
from etc_dist.ops.operation import Candidate
from etc_dist.ops.tile_model import FAMILY, Tiling, dims_of, predictions
from etc_dist.ops.tuning import default_tuning
from etc_dist.runtime.memory_plan import Capacity, plan_memory
from etc_dist.schedule.plan import Choice
from etc_dist.world import World
from tests.conftest import some_of
from tests.layers.programs import SCHEDULES

GRAPHS = {
    MatmulReduceScatter: (returned_matmul_graph, "matmul_reduce_scatter_graph"),
    AllGatherMatmul: (gathered_matmul_graph, "all_gather_matmul_graph"),
}
kinds = pytest.mark.parametrize("kind", GRAPHS)
FIRST = dims_of(Tiling(0, 64))


@pytest.mark.parametrize(
    ("rows", "world_size", "are_few"),
    [
        (1, 8, True),
        (64, 8, True),
        (65, 8, False),
        (256, 2, True),
        (512, 1, True),
        (513, 1, False),
    ],
)
def test_few_rows_are_those_of_all_ranks(rows, world_size, are_few):
    assert has_few_rows(rows, world_size) == are_few


@pytest.mark.parametrize("ranks", [1, 3])
def test_rows_are_gathered_and_returned_by_rows_of_tiles(ranks):
    """Rows of 300 in three tiles, of which two have those of two ranks."""
    dims = {"rows": 300 // ranks, "n": 512, "k": 64}
    dims |= dims_of(Tiling(FAMILY.index(TileShape(128, 112)), 112))
    gather_env = gathered_matmul_graph(ranks).environment(dims, 0)
    scatter_env = returned_matmul_graph(ranks).environment(dims, 0)
    assert gather_env["tile_even_rows"] == scatter_env["tile_even_rows"] == 104
    if ranks > 1:
        assert gather_env["arrived_blocks"] == scatter_env["tiles_down"] == 3
    else:
        assert not gathered_matmul_graph(1).events[1:]


@pytest.mark.mpi(ranks=[1, 2])
@kinds
def test_few_and_many_rows_and_transposed_weights_take_turns(
    kind, world, make, problem, compiled
):
    few, many = GRAPHS[kind][0](1).name, GRAPHS[kind][1]
    most = {MatmulReduceScatter: MOST_RETURNED}.get(kind, MOST_ROWS) // world.size
    op, calls, names = make(kind), [], []
    # Without synchronising in between.
    for rows, w_layout in [(1, "nk"), (most + 1, "nk"), (most, "nk"), (40, "kn")]:
        if rows > most:
            with pytest.raises(WorldError, match=rf"show\(rows={rows}, n=8, k=8\)"):
                op.show(rows=rows, n=8, k=8)  # its program is another one
        calls.append(problem(kind, (rows * world.size, 264, 72), w_layout=w_layout))
        op(calls[-1].x, calls[-1].w, calls[-1].out)
        names.append(op.program.plan.graph.name)
    op.synchronize()
    for p in calls:
        p.check_exact(p.out)
    assert names == [few, many, few, few]
    assert compiled == [few, many, few]  # the last one for w [k, n]
    text = op.show(rows=1, n=264, k=72)
    assert f"us predicted for {world.size} x 264 x 72, " in text


@pytest.mark.mpi
@kinds
@pytest.mark.parametrize("w_layout", some_of(["nk", "kn"], 2))
@pytest.mark.parametrize("first", some_of(range(4), 4))
def test_any_tiles_give_the_result(
    kind, w_layout, first, world, make, problem, monkeypatch
):
    """Tails of rows and columns; k of the last column of tiles whole or divided. One
    program has each fourth of the tiles, at as many numbers of rows."""
    op, number, shapes = make(kind), 0, shapes_for(w_layout, FAMILY)

    def choose(*_, **options):
        shape = shapes[number]
        split = number % 3 % 2 * (shape.depth < 328)
        tiling = Tiling(number, shape.columns, split, 1 + split)
        return [Choice(dim, value, list) for dim, value in dims_of(tiling).items()]

    monkeypatch.setattr("etc_dist.ops.few_rows.choose", choose)
    for number in range(first, len(shapes), 4):
        sizes = (300 + number) // world.size * world.size, 136, 328
        p = problem(kind, sizes, w_layout=w_layout)
        op(p.x, p.w, p.out)
        op.synchronize()
        p.check_exact(p.out)


@kinds
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("rows", [2, 64, 258, 900])
def test_the_policy_counts_the_tiles_of_the_graph(kind, ranks, rows):
    graph, dims = GRAPHS[kind][0], {"rows": rows // ranks, "n": 7168, "k": 8192}
    hosts = SimpleNamespace(count=1)
    world = cast(World, SimpleNamespace(size=ranks, hosts=hosts))
    few, _ = with_few_rows(graph, Candidate(graph), world, "run")
    choices = few.policy(default_tuning(), "nk", dims, 132)
    env = graph(ranks).environment(
        dims | {choice.dim: choice.value for choice in choices}, 0
    )
    across = env["whole_tile_columns"] + env["split_tile_columns"]
    tiles = env["tiles_down"] * across
    assert choices[0].reasons()[1].startswith(f"  {tiles} tiles on 132 workers")


@pytest.mark.parametrize(
    ("rows", "columns", "pushed"),
    [(32, 2048, 2048), (32, 8200, 4096), (128, 8200, 8200)],
)
def test_few_rows_are_pushed_in_pieces(rows, columns, pushed):
    dims = {"n": 64, "k": columns, "rows": rows // 4, **FIRST}
    env = gathered_matmul_graph(4).environment(dims, 0)
    assert env["pushed_columns"] == pushed


def test_few_rows_are_returned_whole_and_more_of_them_by_strips():
    def numbers(rows, k):
        dims = {"n": 8192, "k": k, "rows": rows // 4, **FIRST}
        env = returned_matmul_graph(4).environment(dims, 0)
        names = "few_rows", "many_rows", "strip_columns", "packet_rows"
        return tuple(env[name] for name in names)

    assert numbers(128, 64) == (32, 0, 8192, 1)
    assert numbers(132, 9200) == (0, 33, 512, 4)
    assert numbers(1024, 64) == (0, 256, 512, 4)


@pytest.mark.mpi(ranks=[2])
@kinds
def test_pieces_of_long_rows_are_exchanged(kind, make, problem, world):
    """Two pieces and the rest of x, and of sums."""
    op, p = make(kind), problem(kind, (2 * world.size, 4104, 4104))
    op(p.x, p.w, p.out)
    op.synchronize()
    p.check_exact(p.out)


# After calls whose tiles are large, others have more tasks.
@kinds
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_memory_is_for_any_number_of_few_rows(kind, schedule):
    plan, most = SCHEDULES[schedule](GRAPHS[kind][0](4)), MOST_ROWS // 4
    capacity = Capacity()

    def of(rows: int) -> dict[str, int]:
        sizes = 4 * rows, 5120, 6400
        best = predictions(FAMILY, sizes, 132, default_tuning().tiles)[0]
        return {"rows": rows, "n": 5120, "k": 6400, **dims_of(best.tiling)}

    for dims in capacity_dims(of(97), most, FAMILY, 132, 4, [""]):
        capacity = capacity.grown(plan_memory(plan, dims))
    calls = [plan_memory(plan, of(rows)) for rows in range(1, most + 1, 3)]
    assert all(capacity.holds(call) for call in calls)
