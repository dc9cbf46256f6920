"""Matmuls with parts of k as graphs: proved, and simulated by the NumPy bodies."""

from __future__ import annotations

import numpy as np
import pytest

from etc_dist.errors import ArgumentError, GraphError, RaceError
from etc_dist.ops.matmul import matmul_graph
from etc_dist.ops.tile_model import Tiling, dims_of
from etc_dist.runtime.cpu import simulate
from etc_dist.runtime.region_checks import refuse_empty
from etc_dist.schedule import SCHEDULES, schedule_static
from etc_dist.verify.verify import verify
from tests.conftest import kept_proof
from tests.emulate.cases import matmul_of
from tests.graphs.parts import (
    BY_KIND,
    DIVISIONS,
    EVERY,
    KINDS,
    Division,
    given_to,
    graph_of,
    in_blocks,
    in_order,
    two_matmuls,
)
from tests.layers.programs import without
from tests.layers.reference import draw
from tests.refusals import refused

cases = pytest.mark.parametrize(("kind", "name"), EVERY)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@cases
def test_parts_and_whole_tiles_give_the_reference(kind, name, dtype):
    inputs, [answer], dims = given_to(kind, BY_KIND[kind][name], dtype)
    plan = schedule_static(graph_of(kind, dtype))
    bits = set()
    for seed in range(2):
        outputs = simulate(plan, inputs, dims, seed=seed, epochs=2).outputs
        answer.check(outputs[0]["y"], dtype)
        bits.add(outputs[0]["y"].tobytes())
    assert len(bits) == 1


@pytest.mark.parametrize("shape", KINDS, ids=str)
def test_parts_are_added_in_fp32_in_the_order_of_k(shape, rng):
    (inputs, _, dims), y = in_order(rng, shape, "bfloat16")
    plan = schedule_static(graph_of("nk", shapes=(shape,)))
    for seed in range(3):
        [outputs] = simulate(plan, inputs, dims, seed=seed).outputs
        np.testing.assert_array_equal(outputs["y"], y)


@pytest.mark.parametrize("schedule", SCHEDULES)
@cases
def test_parts_are_proved(kind, name, schedule):
    graph, division = graph_of(kind), BY_KIND[kind][name]
    dims = given_to(kind, division)[2]
    plan = SCHEDULES[schedule](graph)
    for workers in (1, 2, 5):
        assert kept_proof(plan, dims, workers).unchecked == ()


@cases
def test_sums_need_the_event_of_their_parts(kind, name):
    graph, dims = graph_of(kind), given_to(kind, BY_KIND[kind][name])[2]
    assert [events.name for events in graph.events] == ["parts_stored"]
    lacking = without(graph, "parts_stored", "waits", "notifies")
    with pytest.raises(RaceError, match=r" sums\b"):
        verify(schedule_static(lacking), dims, 4)
    with pytest.raises(GraphError):
        verify(schedule_static(without(graph, "parts_stored", "waits")), dims, 4)


@pytest.mark.parametrize(("split", "parts"), [(0, 1), (0, 5), (3, 1), (3, 5)])
def test_no_tile_or_all_of_them_may_be_divided(split, parts):
    division = Division(KINDS[2], (141, 264, 264), 128, split, parts)
    inputs, [answer], dims = given_to("nk", division)
    plan = schedule_static(graph_of("nk"))
    kept_proof(plan, dims, 4)
    answer.check(simulate(plan, inputs, dims).outputs[0]["y"])


def test_parts_without_any_k_are_refused_for_gpus():
    shape, graph = KINDS[3], matmul_graph(1, shapes=[KINDS[3]])
    division = Division(shape, (8, 8, 200), shape.columns, 1, 3)
    _, _, dims = given_to("nk", division, shapes=[shape])
    with pytest.raises(GraphError, match=r"from \[0, 256\], outside of \[8, 200\]"):
        verify(schedule_static(graph), dims, 4)
    refused(
        lambda: refuse_empty(graph, graph.environment(dims, 0)),
        "a region of tile_matmul is empty|task multiply_parts[2, 0, 0]",
        ArgumentError,
    )


def test_several_matmuls_of_a_graph_have_their_own_names():
    graph = two_matmuls(1)
    assert {events.name for events in graph.events} == {
        "y_parts_stored",
        "z_parts_stored",
    }
    assert len({call.name for call in graph.calls}) == 6


@pytest.mark.parametrize("blocks", [True, False])
@pytest.mark.parametrize("name", ["turns", "tall", "two tall", "rows", "wide"])
def test_a_matmul_waits_for_the_rows_of_another_one(name, blocks, rng):
    """Rows of whole tiles, and of tiles whose parts are added in slices."""
    division = DIVISIONS[name]
    m, n, k = sizes = division.sizes
    graph = in_blocks(1, shapes=[division.shape], blocks=blocks)
    dims = dict(zip("mnk", sizes, strict=True))
    split = int(n > division.shape.depth)  # parts of n must not be empty
    for prefix, divided in (
        ("w_", (division.split, division.parts)),
        ("v_", (split, 1 + split)),
    ):
        dims |= dims_of(Tiling(0, division.columns, *divided), prefix)
    shapes = {"x": (m, k), "w": (n, k), "v": (k, n)}
    inputs = {tensor: draw(rng, shape, "bfloat16") for tensor, shape in shapes.items()}
    between = matmul_of(inputs["x"], inputs["w"]).expected.astype(inputs["x"].dtype)
    plan = schedule_static(graph)
    assert kept_proof(plan, dims, 4).unchecked == ()
    [outputs] = simulate(plan, [inputs], dims).outputs
    matmul_of(between, inputs["v"]).check(outputs["y"])
    for verbs in (["waits"], ["waits", "notifies"]):
        lacking = schedule_static(without(graph, "done", *verbs))
        with pytest.raises(RaceError if len(verbs) > 1 else GraphError):
            verify(lacking, dims, 4)
