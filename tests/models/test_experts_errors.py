"""A mixture of experts with a wrong wait is refused, with the layer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from etc_dist.functions.route_rows import route_rows
from etc_dist.functions.router import Router
from etc_dist.functions.routing import PLAIN
from etc_dist.functions.tile_shape import TileShape
from etc_dist.models.decoder import decoder_graph
from etc_dist.models.experts import DecoderMixture
from etc_dist.models.sizes import DecoderSizes
from tests.models.steps import plan_data, share_dims, tile_dims
from tests.verify.waits import Proved

EXPERTS, TOP_K, STEPS, LAYERS, DENSE, TURN = 16, 4, 2, 4, 2, 3
OF_DENSE = ("dense_up_matmul", 0), ("dense_down_matmul", 0), ("add_experts_norm", 3)
"""Waits of dense layers alone, which come before the others."""
FEW, MANY = 3, 20
"""Rows that fit a tile of 8, and rows that are gathered."""
SHAPES = (TileShape(8, 64, swapped=True), TileShape(128, 112))
MIXTURE = DecoderMixture(EXPERTS, Router(TOP_K), PLAIN, has_dense=True)
SIZES = DecoderSizes(*(6, 2, 64), page_size=16, mixture=MIXTURE)
OPTIONS = {"sizes": SIZES, "shapes": SHAPES, "best_columns": 64}
GRAPH = decoder_graph(1, **OPTIONS)
CALLS = (
    "score_experts",
    "choose_experts",
    "route_rows",
    "shared_up_matmul",
    "shared_down_matmul",
    "dense_up_matmul",
    "dense_down_matmul",
    "hide_rows",
    "gather",
    "expert_up_matmul",
    "expert_down_matmul",
    "add_experts_norm",
)
OF_FEW = ("expert_up_matmul", 0), ("add_experts_norm", 0)
MLPS = [
    "shared_up_matmul",
    "shared_down_matmul",
    "dense_up_matmul",
    "dense_down_matmul",
]
"""Those of the shared expert and of dense layers."""
WAITS = [
    (c.name, n, FEW if (c.name, n) in OF_FEW else MANY)
    for c in GRAPH.calls
    if c.name in CALLS
    for n in range(len(c.waits))
]
"""Calls, waits, and a number of rows for which the wait is needed: an event of gathered
rows comes after that of the routing."""
KNOWN = "expert_up_matmul", 0, FEW
"""The wait after which a loaded extent is known: no queue could do without."""
STREAMS, EARLY = ("expert_down_matmul", 0, MANY), ("add_experts_norm", 0, FEW)
"""Waits after which weights are loaded, and rows are read. The last wait of these tasks
comes after it: it suffices where the first index is loaded, and for a queue's tasks."""
NO_EXPERTS = "add_experts_norm", 1, MANY
"""The wait for gathered rows where no expert has any."""
WAITS.remove(NO_EXPERTS)
for routing in ("choose_experts", "route_rows"):
    WAITS.remove((routing, 0, MANY))  # their reads are ordered by that of the embedding
WAITS.append(("route_rows", 1, FEW))
BOTH = pytest.mark.parametrize("schedule", ["static", "dynamic"])


def dims_of(rows: int) -> dict[str, int]:
    sizes = {"hidden": 72, "inner": 136, "shared_inner": 40, "positions": 4096}
    sizes |= {"dense_layers": DENSE, "sparse_layers": LAYERS - DENSE, "dense_inner": 88}
    sizes |= {"vocabulary": 520, "all_ids": 520}
    pages = {"requests": rows, "most_pages": 64, "pages": 64 * rows}
    shapes = tile_dims(SHAPES, dict.fromkeys(SIZES.matmuls, 0))
    loops = {"steps": STEPS, "layers": LAYERS, "samples": 0}
    return (
        {"rows": rows, "outputs": rows, "stops": 1}
        | share_dims(2)
        | loops
        | sizes
        | pages
        | shapes
    )


def data_of(rows: int) -> dict[str, Any]:
    """What a run with random logits loads."""
    assert SIZES.mixture is not None
    function = route_rows(SIZES.mixture.routing("bfloat16"))
    rng = np.random.default_rng(rows)
    more = max(0, rows * TOP_K - EXPERTS) // 8
    tiles = min(rows * TOP_K, EXPERTS + (rows > 8) * more)
    place = np.zeros((STEPS, LAYERS, rows, TOP_K), np.int32)
    num_used = np.zeros((STEPS, LAYERS, 1), np.int32)
    of_tiles = np.zeros((STEPS, LAYERS, tiles, 2), np.int32)
    for turn in np.ndindex(STEPS, LAYERS):
        logits = rng.standard_normal((rows, EXPERTS)).astype(np.float32)
        weights = np.zeros((rows, TOP_K), np.float32)
        expert_ids, ids = np.zeros((2, rows, TOP_K), np.int32)
        of_turn = place[turn], of_tiles[turn], num_used[turn]
        numbers = {"tile_rows": 8, "stride": 8, "gathers": int(rows > 8)}
        position = np.full(rows, -(turn[1] < DENSE), np.int32)
        function.body(logits, position, expert_ids, ids, weights, *of_turn, **numbers)
    tables = {
        "expert_place": place,
        "expert_tile": of_tiles,
        "expert_tiles_used": num_used,
    }
    return {name: [array] for name, array in tables.items()} | plan_data(dims_of(rows))


def proved(rows: int, graph: Any = GRAPH, is_for_all_data: bool = False) -> Proved:
    return Proved(graph, dims_of(rows), None if is_for_all_data else data_of(rows))


@BOTH
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("rows", [FEW, MANY])
@pytest.mark.parametrize("is_for_all_data", [False, True])
def test_a_mixture_is_proved(is_for_all_data, rows, early, schedule):
    graph = decoder_graph(1, **OPTIONS, early=early)
    proved(rows, graph, is_for_all_data).check(schedule)


@BOTH
def test_gathered_rows_are_awaited_where_no_expert_has_any(schedule):
    name, number, rows = NO_EXPERTS
    fault = proved(rows, is_for_all_data=True).lacks(schedule, name, number)
    assert "gathered" in fault and "for which no task waits" in fault


def test_a_program_that_begins_no_task_early_waits_twice_where_it_loads_counts():
    graph = decoder_graph(1, **OPTIONS, early=False)
    twice = [call for call in graph.calls if len(call.waits) > 1]
    names = [
        "attend",
        "attend_prompt",
        "combine_slices",
        "o_matmul",
        "expert_up_matmul",
        "expert_down_matmul",
        "add_experts_norm",
    ]
    assert [call.name for call in twice] == names
    assert {call.waits[0].events.name for call in twice} == {"planned", "routed"}


def with_schedules(waits):
    """The waits that are needed under each schedule: a task from a queue begins after
    all of its waits."""
    late = [wait for wait in waits if wait not in (KNOWN, STREAMS, EARLY)]
    cases = {"static": waits, "dynamic": late}
    every = [
        pytest.param(
            *(*wait, name),
            # Calls without loads are proved alike under both schedules.
            marks=pytest.mark.exhaustive
            if name == "dynamic" and wait[0] in MLPS
            else [],
        )
        for name, some in cases.items()
        for wait in some
    ]
    return pytest.mark.parametrize(("name", "number", "rows", "schedule"), every)


@with_schedules([wait for wait in WAITS if wait != STREAMS])
def test_each_wait_is_needed(name, number, rows, schedule):
    assert ", layer=" in proved(rows).lacks(schedule, name, number)


@with_schedules(WAITS)
def test_a_wait_for_the_layer_before_is_refused_with_the_layer(
    name, number, rows, schedule
):
    turn = DENSE - 1 if (name, number) in OF_DENSE else TURN
    fault = proved(rows).before(schedule, name, number, 1, turn)
    assert f", layer={turn}" in fault
