"""The sum of experts' outputs and its RMSNorm: both bodies against fp64."""

from __future__ import annotations

import numpy as np
import pytest

from etc_dist.functions.add_experts_norm import add_experts_norm
from etc_dist.functions.router import Router
from etc_dist.functions.routing import GATED, PLAIN, Routing
from tests.functions.both import both
from tests.functions.compiled import check_compiled
from tests.graphs.calls import one_call
from tests.layers.reference import draw

EPS = 1e-5
OUTPUTS = 40


def mixed(top_k, dtype, shared=""):
    total = f"total rows/1 columns {dtype}"
    of_shared = [f"shared rows/1 columns {dtype}", "logits rows/1 4[1:2] float32"]
    return one_call(
        1,
        add_experts_norm(Routing(8, Router(top_k), dtype), EPS, shared),
        reads=[
            f"place 2[1] rows/1 {top_k} int32",
            f"weights rows/1 {top_k} float32",
            f"outputs {OUTPUTS} columns {dtype}",
            *of_shared[: ("", PLAIN, GATED).index(shared)],
            *(total, f"gain columns {dtype}"),
        ],
        writes=[total, f"y rows/1 columns {dtype}"],
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
    arrays = {
        "place": rng.integers(-1, OUTPUTS, (2, rows, top_k), np.int32),
        "weights": rng.random((rows, top_k), np.float32),
        "outputs": draw(rng, (OUTPUTS, columns), dtype),
        "gain": draw(rng, (columns,), dtype),
        "total": draw(rng, (rows, columns), dtype),
    }
    if shared:
        arrays["shared"] = draw(rng, (rows, columns), dtype)
    if shared == GATED:
        arrays["logits"] = rng.standard_normal((rows, 4)).astype(np.float32)
    arrays["outputs"][0] = np.nan  # nothing reads it
    arrays["place"][arrays["place"] == 0] = -1
    wide = {name: a.astype(np.float64) for name, a in arrays.items()}
    place, weights = arrays["place"][1], wide["weights"] * (arrays["place"][1] >= 0)
    parts = np.where(place[..., None] < 0, 0, wide["outputs"][place])
    sums = wide["total"] + (weights[..., None] * parts).sum(axis=1)
    if shared:
        is_gated = shared == GATED
        gate = 1 / (1 + np.exp(-wide["logits"][:, 1:2])) if is_gated else 1
        sums += wide["shared"] * gate
    dims = {"rows": rows, "columns": columns}
    for outputs in both(mixed(top_k, dtype, shared), arrays, dims):
        total = outputs["total"].astype(np.float64)
        assert np.all(np.abs(total - sums) <= 2**-8 * np.abs(sums) + 1e-5)
        scale = np.sqrt((total**2).mean(axis=1, keepdims=True) + EPS)
        norm = total / scale * wide["gain"]
        error = np.abs(outputs["y"].astype(np.float64) - norm)
        assert np.all(error <= 2**-8 * np.abs(norm) + 1e-6)


@pytest.mark.parametrize("top_k", [20, pytest.param(8, marks=pytest.mark.exhaustive)])
def test_the_cuda_body_compiles_without_spills(top_k):
    check_compiled(mixed(top_k, "bfloat16"))
