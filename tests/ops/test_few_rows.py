"""The collectives with few rows: which they are, and the program that serves them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from etc_dist import AllGatherMatmul, MatmulReduceScatter
from etc_dist.errors import WorldError
from etc_dist.functions.tile_matmul import LEAST_ROWS, TileShape, shapes_for
from etc_dist.ops.all_gather_matmul import gathered_matmul_graph
from etc_dist.ops.few_rows import MOST_ROWS, capacity_dims, has_few_rows, with_few_rows
from etc_dist.ops.matmul_policy import (
    BLOCK,
    SHAPES,
    choose,
    has_blocks,
    rate,
    tiles_down,
)
from etc_dist.ops.matmul_reduce_scatter import returned_matmul_graph
from etc_dist.ops.operation import Candidate
from etc_dist.ops.tuning import default_tuning
from etc_dist.runtime.memory_plan import Capacity, plan_memory
from etc_dist.schedule.plan import Choice
from etc_dist.world import World
from tests.conftest import some_of
from tests.layers.programs import SCHEDULES
from tests.ops.tile_counts import tiles_in, tiles_of

GRAPHS = {
    MatmulReduceScatter: (returned_matmul_graph, "matmul_reduce_scatter_graph"),
    AllGatherMatmul: (gathered_matmul_graph, "all_gather_matmul_graph"),
}
kinds = pytest.mark.parametrize("kind", GRAPHS)


@pytest.mark.parametrize(
    ("rows", "world_size", "are_few"),
    [
        (1, 8, True),
        (128, 8, True),
        (129, 8, False),
        (255, 4, True),
        (256, 4, False),
        (256, 2, False),
        (300, 2, True),
        (1000, 1, True),
    ],
)
def test_few_rows_are_no_whole_blocks(rows, world_size, are_few):
    assert has_few_rows(rows, world_size) == are_few


@kinds
@pytest.mark.parametrize(
    ("rows", "tile", "each"),
    [
        (24, TileShape(128, 128), 96),
        (50, TileShape(128, 128), 104),
        (50, TileShape(256, 128, "rows"), 208),
        (50, TileShape(128, 128, "rows", swapped=True), 112),
        (70, TileShape(128, 128), 72),
        (70, TileShape(256, 128, "rows"), 144),
        (70, TileShape(144, 256, swapped=True), 144),
        (70, TileShape(128, 128, "rows", swapped=True), 16),
        (256, TileShape(208, 256, swapped=True), 128),
    ],
)
def test_rows_of_a_block_are_divided_evenly(kind, rows, tile, each):
    graph, dims = GRAPHS[kind][0](4), {"n": 512, "k": 64, "rows": rows}
    env = graph.environment(dims | {"shape": SHAPES.index(tile)}, 0)
    assert env["tile_even_rows"] == each


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_no_tile_is_in_two_blocks(shape):
    graph, dims = gathered_matmul_graph(2, shapes=[shape]), {"n": 64, "k": 64}
    for rows in (258, 264, 300, 400, 514, 600, 778, 1000, 1100, 2100, 4098):
        env = graph.environment(dims | {"rows": rows // 2, "shape": 0}, 0)
        each = env["tile_even_rows"]
        assert env["block_rows"] % each == 0
        assert env["block_rows"] <= BLOCK < env["block_rows"] * env["blocks"]
        if each != LEAST_ROWS:
            assert -(-rows // each) == tiles_down(shape, rows, in_blocks=True)
        else:
            assert shape.swapped and not shape.is_tall


@pytest.mark.parametrize(("rows", "blocks"), [(264, 1), (1280, 1), (1281, 6)])
def test_rows_of_one_rank_are_one_block_that_tiles_divide(rows, blocks):
    shape = TileShape(144, 256, swapped=True)
    graph = gathered_matmul_graph(1, shapes=[shape])
    env = graph.environment({"n": 64, "k": 64, "rows": rows, "shape": 0}, 0)
    assert env["blocks"] == blocks
    in_blocks = has_blocks(rows, 1)
    assert in_blocks == (blocks > 1)
    down = tiles_down(shape, rows, in_blocks)
    assert -(-rows // env["tile_even_rows"]) == down


@pytest.mark.mpi(ranks=[1, 2])
@kinds
def test_few_rows_whole_blocks_and_transposed_weights_take_turns(
    kind, world, make, problem, compiled
):
    few, many = GRAPHS[kind][0](1).name, GRAPHS[kind][1]
    most = MOST_ROWS // world.size
    op, calls, names = make(kind), [], []
    # Without synchronising in between.
    for rows, w_layout in [(1, "nk"), (256, "nk"), (most - 1, "nk"), (40, "kn")]:
        if rows == 256:
            with pytest.raises(WorldError, match=r"show\(rows=256, n=8, k=8\)"):
                op.show(rows=256, n=8, k=8)  # its program is another one
        calls.append(problem(kind, (rows * world.size, 264, 72), w_layout=w_layout))
        op(calls[-1].x, calls[-1].w, calls[-1].out)
        names.append(op.program.plan.graph.name)
    op.synchronize()
    for p in calls:
        p.check_exact(p.out)
    assert names == [few, many, few, few]
    assert compiled == [few, many, few]  # the last one for w [k, n]
    shown = op.show(rows=1, n=264, k=72)
    assert f"us predicted for {world.size} x 264 x 72\n" in shown


@pytest.mark.mpi
@kinds
@pytest.mark.parametrize("w_layout", ["nk", "kn"])
@pytest.mark.parametrize("first", some_of(range(8), 8))
def test_any_tiles_give_the_result(
    kind, w_layout, first, world, make, problem, monkeypatch
):
    """Two blocks and more of several ranks' rows; tails of rows and columns. One
    program has each eighth of the tiles, at as many numbers of rows."""
    op, number = make(kind), 0
    monkeypatch.setattr(
        "etc_dist.ops.few_rows.explained",
        lambda dim, *_, in_order, in_blocks: Choice(dim, number, list),
    )
    for number in range(first, len(shapes_for(w_layout, SHAPES)), 8):
        sizes = (300 + number) // world.size * world.size, 328, 136
        p = problem(kind, sizes, w_layout=w_layout)
        op(p.x, p.w, p.out)
        op.synchronize()
        p.check_exact(p.out)


@kinds
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("rows", range(258, 1340, 54))
def test_the_policy_counts_the_tiles_of_the_graph(kind, ranks, rows):
    graph = GRAPHS[kind][0]
    hosts = SimpleNamespace(count=1)
    world = cast(World, SimpleNamespace(size=ranks, hosts=hosts))
    few, _ = with_few_rows(graph, Candidate(graph), world, "run")
    dims = {"rows": rows // ranks, "n": 7168, "k": 8192}
    [choice] = few.policy(default_tuning(), "nk", dims, 132)
    best = rate(rows, 7168, 8192, 132, in_blocks=ranks > 1 or rows > 1280)[0]
    assert choice.value == best.number
    env = graph(ranks).environment(dims | {"shape": choice.value}, 0)
    assert tiles_in(choice.reasons()) == tiles_of(env, "matmul")


@pytest.mark.parametrize(
    ("rows", "columns", "pushed", "summed"),
    [
        (32, 2048, 2048, 512),
        (32, 8200, 4096, 512),
        (128, 8200, 8200, 512),
        (132, 5120, 5120, 1024),
    ],
)
def test_few_rows_are_pushed_and_summed_in_pieces(rows, columns, pushed, summed):
    env = returned_matmul_graph(4).environment(
        {"n": columns, "k": 64, "rows": rows // 4, "shape": 0}, 0
    )
    assert env["sent_columns"] == pushed
    assert env["sends"] == -(-columns // pushed)
    assert env["summed_columns"] == summed
    env = gathered_matmul_graph(4).environment(
        {"n": 64, "k": columns, "rows": rows // 4, "shape": 0}, 0
    )
    assert env["pushed_columns"] == pushed


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
        shape = choose(4 * rows, 5120, 6400, 132)
        return {"rows": rows, "n": 5120, "k": 6400, "shape": shape}

    for dims in capacity_dims(of(97), most, SHAPES, ["shape"]):
        capacity = capacity.grown(plan_memory(plan, dims))
    calls = [plan_memory(plan, of(rows)) for rows in range(1, most + 1, 3)]
    assert all(capacity.holds(call) for call in calls)
