"""The sum of experts' outputs and its RMSNorm: both bodies against fp64."""

from __future__ import annotations

import numpy as np
import pytest

from etc_dist.emulate import Emulator
from etc_dist.functions.add_experts_norm import add_experts_norm
from etc_dist.functions.combine_rows import GATED, PLAIN
from etc_dist.functions.router import Router
from etc_dist.functions.routing import Routing
from etc_dist.ir import Graph, graph_function, span
from etc_dist.runtime.cpu import simulate
from etc_dist.schedule import schedule_static
from tests.functions.compiled import check_compiled
from tests.layers.reference import draw

EPS = 1e-5
OUTPUTS = 40


@graph_function
def mixed(g: Graph, *, top_k: int, dtype: str, shared: str = "") -> None:
    rows, columns = g.dims("rows columns")
    place = g.input("place", (2, rows, top_k), "int32")
    weights = g.input("weights", (rows, top_k), "float32")
    outputs = g.input("outputs", (OUTPUTS, columns), dtype)
    gain = g.input("gain", (columns,), dtype)
    total = g.state("total", (rows, columns), dtype)
    y = g.output("y", (rows, columns), dtype)
    rows_of_shared = g.input("shared", (rows, columns), dtype)
    logits = g.input("logits", (rows, 4), "float32")
    (r,) = grid = g.grid(r=rows)
    own = span(r, 1), slice(None)
    of_shared = [rows_of_shared[own], logits[own[0], span(1, 1)]]
    g.call(
        add_experts_norm(Routing(8, Router(top_k), dtype), EPS, shared),
        grid,
        reads=[
            *(place[1, *own], weights[own], outputs[:, :]),
            *of_shared[: ("", PLAIN, GATED).index(shared)],
            *(total[own], gain[:]),
        ],
        writes=[total[own], y[own]],
    )


@pytest.mark.parametrize(
    ("top_k", "columns", "dtype", "shared"),
    [
        pytest.param(8, 2056, "bfloat16", "", marks=pytest.mark.exhaustive),
        pytest.param(8, 2056, "bfloat16", PLAIN, marks=pytest.mark.exhaustive),
        (4, 64, "float16", GATED),
        (20, 8200, "bfloat16", ""),
    ],
)
def test_rows_get_the_weighted_sum_of_their_outputs(top_k, columns, dtype, shared, rng):
    rows = 3
    given = {
        "place": rng.integers(-1, OUTPUTS, (2, rows, top_k), np.int32),
        "weights": rng.random((rows, top_k), np.float32),
        "outputs": draw(rng, (OUTPUTS, columns), dtype),
        "gain": draw(rng, (columns,), dtype),
        "total": draw(rng, (rows, columns), dtype),
        "shared": draw(rng, (rows, columns), dtype),
        "logits": rng.standard_normal((rows, 4)).astype(np.float32),
    }
    given["outputs"][0] = np.nan  # nothing reads it
    given["place"][given["place"] == 0] = -1
    wide = {name: a.astype(np.float64) for name, a in given.items()}
    place, weights = given["place"][1], wide["weights"] * (given["place"][1] >= 0)
    parts = np.where(place[..., None] < 0, 0, wide["outputs"][place])
    sums = wide["total"] + (weights[..., None] * parts).sum(axis=1)
    if shared:
        gate = 1 / (1 + np.exp(-wide["logits"][:, 1:2]))
        sums += wide["shared"] * (gate if shared == GATED else 1)
    graph = mixed(1, top_k=top_k, dtype=dtype, shared=shared)
    dims = {"rows": rows, "columns": columns}
    for found in (
        simulate(schedule_static(graph), [given], dims).outputs[0],
        Emulator(graph, workers=2).run([given], dims)[0],
    ):
        total = found["total"].astype(np.float64)
        assert np.all(np.abs(total - sums) <= 2**-8 * np.abs(sums) + 1e-5)
        scale = np.sqrt((total**2).mean(axis=1, keepdims=True) + EPS)
        wanted = total / scale * wide["gain"]
        error = np.abs(found["y"].astype(np.float64) - wanted)
        assert np.all(error <= 2**-8 * np.abs(wanted) + 1e-6)


@pytest.mark.parametrize("top_k", [20, pytest.param(8, marks=pytest.mark.exhaustive)])
def test_the_cuda_body_compiles_without_spills(top_k):
    check_compiled(mixed(1, top_k=top_k, dtype="bfloat16"))
