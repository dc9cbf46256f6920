"""Routing of a step's rows: both bodies against a loop over rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from etc_dist.functions.choose_experts import CHOSEN_ROWS, choose_experts
from etc_dist.functions.route_rows import MOST_AT_ONCE, route_rows
from etc_dist.functions.router import Router
from etc_dist.functions.routing import Routing
from etc_dist.ir import GraphFunction
from tests.conftest import first_always
from tests.functions.both import both, both_on_ranks
from tests.functions.compiled import check_compiled
from tests.graphs.calls import Task, calls

QWEN, FEW, MANY = (
    Routing(128, Router(8), "bfloat16"),
    Routing(24, Router(4, False), "bfloat16"),
    Routing(512, Router(16), "bfloat16"),
)


def routed(
    world_size: int, *, routing: Routing, num_own_experts: int = 0
) -> GraphFunction:
    """own: experts of a rank. The dim `before`: the rows that choose in tasks before,
    all or none."""
    parts = f"""
        let blocks = ceildiv(before, {CHOSEN_ROWS})
        input logits [rows, {routing.experts}] float32
        input position [rows] int32
        state ids [rows, {routing.top_k}] int32
        output weights [rows, {routing.top_k}] float32
        events chosen [1] expects blocks
    """
    block = f"tile(b, {CHOSEN_ROWS})"
    new = f"span(0, minimum({MOST_AT_ONCE}, rows - before))"
    choose = Task(
        choose_experts(routing, CHOSEN_ROWS, has_position=True),
        [f"logits[{block}, :]", f"position[{block}]"],
        [f"ids[{block}, :]", f"weights[{block}, :]"],
        grid="b: blocks",
        notifies=["chosen[0]"],
    )
    numbers = ("tile_rows", "stride", "gathers")
    route = Task(
        route_rows(routing, num_own_experts=num_own_experts),
        [f"logits[{new}, :]", f"position[{new}]", "ids[:, :]"],
        [
            f"ids[{new}, :]",
            f"weights[{new}, :]",
            f"place rows {routing.top_k} int32",
            "tile tiles 2 int32",
            "used 1 int32",
        ],
        waits=["chosen[0]"],
        values={name: name for name in numbers},
    )
    dims = f"rows before tiles {' '.join(numbers)}"
    return calls(world_size, tasks=[choose, route], dims=dims, parts=parts)


def expected(ids: Any, dims: dict[str, int], experts: int) -> Any:
    """place, expert and count, by the rows of one expert after the other."""
    place = np.full(ids.shape, -1)
    expert, count = np.zeros((2, dims["tiles"]), int)
    tile = 0
    for e in range(experts):
        choices = [
            (row, list(ids[row]).index(e)) for row in range(len(ids)) if e in ids[row]
        ]
        size = dims["tile_rows"]
        parts = [choices[i : i + size] for i in range(0, len(choices), size)]
        if not dims["gathers"]:
            parts = [choices] if choices else []
        for part in parts:
            for choice_idx, (row, k) in enumerate(part):
                at = choice_idx if dims["gathers"] else row
                place[row, k] = tile * dims["stride"] + at
            expert[tile] = e
            count[tile] = len(part) if dims["gathers"] else len(ids)
            tile += 1
    return place, expert, count


def routed_rows(
    rng: Any, routing: Routing, rows: int, tile_rows: int, gathers: int, skew: int
) -> tuple[dict[str, Any], dict[str, int]]:
    """Inputs and dims. skew: how much lower experts are preferred."""
    logits = rng.standard_normal((rows, routing.experts)).round(1)  # with ties
    logits -= skew * np.log1p(np.arange(routing.experts))
    position = rng.integers(-1, 5, rows) if rows > 1 else np.zeros(1)
    arrays = {
        "logits": logits.astype(np.float32),
        "position": position.astype(np.int32),
    }
    arrays["ids"] = np.full((rows, routing.top_k), 9, np.int32)
    dims = {"rows": rows, "before": rows if rows > MOST_AT_ONCE else 0}
    dims |= {"tile_rows": tile_rows, "stride": tile_rows + 8}
    return arrays, dims | {"gathers": gathers, "tiles": 2 * routing.experts}


def check_routes(
    outputs: Any,
    routing: Routing,
    arrays: Any,
    dims: Any,
    first: int = 0,
    num_own_experts: int = 0,
) -> None:
    """first, own: the experts of the rank, if it has only some."""
    ids, weights = routing.router.choose(arrays["logits"])
    is_unused = arrays["position"] < 0
    ids[is_unused], weights[is_unused] = -1, 0
    np.testing.assert_array_equal(outputs["ids"], ids)
    np.testing.assert_allclose(outputs["weights"], weights, rtol=1e-5)
    if num_own_experts:
        ids = np.where(
            (ids >= first) & (ids < first + num_own_experts), ids - first, -1
        )
    place, expert, count = expected(ids, dims, num_own_experts or routing.experts)
    np.testing.assert_array_equal(outputs["place"], place)
    np.testing.assert_array_equal(outputs["tile"], np.stack([expert, count], axis=1))
    assert outputs["used"] == np.count_nonzero(count)


@pytest.mark.parametrize(
    ("routing", "rows", "tile_rows", "gathers", "skew"),
    [
        (QWEN, 1, 8, 0, 0),
        (QWEN, 7, 8, 0, 1),
        (FEW, 16, 8, 1, 0),
        (QWEN, 40, 8, 1, 0),
        (QWEN, 128, 32, 1, 2),
        (FEW, 128, 64, 1, 0),
        (FEW, 9, 16, 0, 0),
        (QWEN, 600, 32, 1, 2),  # more than a block of rows
        (FEW, 530, 64, 1, 0),
        (FEW, 520, 528, 0, 1),
        (MANY, 140, 16, 1, 0),
    ],
)
def test_tiles_have_the_rows_of_their_experts(
    routing, rows, tile_rows, gathers, skew, rng, kernels
):
    arrays, dims = routed_rows(rng, routing, rows, tile_rows, gathers, skew)
    for outputs in both(routed(1, routing=routing), arrays, dims, kernels):
        check_routes(outputs, routing, arrays, dims)


@pytest.mark.parametrize(("rows", "gathers"), [(9, 0), (40, 1)])
def test_a_rank_has_tiles_of_its_experts_alone(rows, gathers, rng):
    arrays, dims = routed_rows(rng, FEW, rows, 16, gathers, 1)
    graph = routed(3, routing=FEW, num_own_experts=8)
    for results in both_on_ranks(graph, [arrays] * 3, dims):
        for rank, outputs in enumerate(results):
            check_routes(outputs, FEW, arrays, dims, first=8 * rank, num_own_experts=8)


@pytest.mark.parametrize(
    "routing", first_always([(QWEN,), (Routing(8, Router(2), "bfloat16"),)], 1)
)
def test_the_cuda_body_compiles_without_spills(routing):
    check_compiled(routed(1, routing=routing))
