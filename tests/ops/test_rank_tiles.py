"""Tiles of the rows of one rank: their choice, padding and memory."""

from __future__ import annotations

import pytest

from etc_dist.ops.all_gather_matmul import all_gather_matmul_graph
from etc_dist.ops.few_rows import capacity_dims
from etc_dist.ops.matmul_reduce_scatter import matmul_reduce_scatter_graph
from etc_dist.ops.tile_model import FAMILY, choose
from etc_dist.ops.tuning import default_tuning
from etc_dist.runtime.memory_plan import Capacity, plan_memory
from etc_dist.schedule import schedule_static

graphs = pytest.mark.parametrize(
    "graph", [matmul_reduce_scatter_graph, all_gather_matmul_graph]
)


def chosen(rows: int, ranks: int = 4) -> dict[str, int]:
    dims = {"rows": rows, "n": 8192, "k": 7168}
    sizes = ranks * rows, dims["n"], dims["k"]
    choices = choose(sizes, 132, FAMILY, default_tuning(), ranks=ranks)
    return dims | {choice.dim: choice.value for choice in choices}


@graphs
@pytest.mark.parametrize("rows", [300, 320, 700, 777])
def test_tiles_have_few_rows_of_padding(graph, rows):
    env = graph(4).environment(chosen(rows), 0)
    computed = env["tiles_down"] * env["tile_even_rows"]
    assert rows <= computed <= 1.03 * rows
    tiles = 4 * env["tiles_down"] * env["tiles_across"]
    reasons = choose((4 * rows, 8192, 7168), 132, FAMILY, default_tuning(), ranks=4)[
        0
    ].reasons()
    assert f"  {tiles} tiles on 132 workers" in reasons[1]


@graphs
def test_memory_is_for_fewer_rows_too(graph):
    """They may have more parts of k."""
    plan, capacity = schedule_static(graph(4)), Capacity()
    for dims in capacity_dims(chosen(2048), 1, FAMILY, 132, 1, [""]):
        capacity = capacity.grown(plan_memory(plan, dims))
    for rows in range(130, 2048, 137):
        assert capacity.holds(plan_memory(plan, chosen(rows)))
