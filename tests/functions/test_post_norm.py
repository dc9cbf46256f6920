"""RMSNorm of what is added to a residual: both bodies against fp64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from etc_dist.emulate import Emulator
from etc_dist.functions.post_norm import post_norm, post_ranks_norm
from etc_dist.ir import Graph, graph_function, span
from etc_dist.runtime.cpu import simulate
from etc_dist.schedule import schedule_static
from tests.functions.compiled import check_compiled
from tests.functions.test_rms_norm import EPS, expected
from tests.layers.reference import draw


@graph_function
def norms(
    g: Graph, *, dtype: str, has_bias: bool, normalizes_sum: bool, offset: int
) -> None:
    """total, which is updated, and y of `post_norm`; on several ranks of parts."""
    rows, columns = g.dims("rows columns")
    parts = g.input("parts", (g.world_size, rows, columns), dtype)
    gains = g.input("gains", (3, columns), dtype)
    total = g.state("total", (rows, columns), dtype)
    y = g.output("y", (rows, columns), dtype)
    (r,) = grid = g.grid(r=rows)
    own = span(r, 1), slice(None)
    is_sum = g.world_size > 1
    make = post_ranks_norm if is_sum else post_norm
    bias, gain = [gains[2, :]] * has_bias, [gains[1, :]] * normalizes_sum
    options = {"has_bias": has_bias, "normalizes_sum": normalizes_sum}
    g.call(
        make(dtype, EPS, offset=offset, **options),
        grid,
        reads=[
            parts[:, *own] if is_sum else parts[0, *own],
            *bias,
            total[own],
            gains[0, :],
            *gain,
        ],
        writes=[total[own], y[own]],
    )


def reference(
    given: Any, has_bias: bool, normalizes_sum: bool, offset: int
) -> tuple[Any, Any]:
    gains = given["gains"].astype(np.float64) + offset
    x = given["parts"].astype(np.float32).sum(axis=0)
    x = x + given["gains"][2].astype(np.float32) if has_bias else x
    x = x.astype(given["total"].dtype)
    total = expected(x, gains[0]) + given["total"].astype(np.float64)
    if not normalizes_sum:
        return total, total
    return total, expected(total.astype(x.dtype), gains[1])


# Of the last one a thread has vectors that it loads again.
@pytest.mark.parametrize(
    ("ranks", "columns", "dtype", "has_bias", "normalizes_sum", "offset"),
    [
        (1, 64, "float16", True, True, 1),
        (1, 5120, "bfloat16", False, False, 0),
        (2, 264, "bfloat16", True, False, 0),
        (3, 16648, "bfloat16", False, True, 0),
    ],
)
def test_what_is_added_is_normalized(
    ranks, columns, dtype, has_bias, normalizes_sum, offset, rng
):
    given = {
        "parts": draw(rng, (ranks, 2, columns), dtype),
        "gains": draw(rng, (3, columns), dtype),
        "total": draw(rng, (2, columns), dtype),
    }
    options = {"has_bias": has_bias, "normalizes_sum": normalizes_sum}
    options["offset"] = offset
    graph, dims = norms(ranks, dtype=dtype, **options), {"rows": 2, "columns": columns}
    wanted = dict(zip(("total", "y"), reference(given, **options), strict=True))
    for found in (
        simulate(schedule_static(graph), [given] * ranks, dims).outputs[-1],
        Emulator(graph, workers=2).run([given] * ranks, dims)[-1],
    ):
        for name, of in wanted.items():
            error = np.abs(found[name].astype(np.float64) - of)
            assert np.all(error <= 2**-7 * np.abs(of) + 2**-7), name


@pytest.mark.parametrize("ranks", [1, 4])
def test_the_cuda_bodies_compile_without_spills(ranks):
    options = {"has_bias": True, "normalizes_sum": True, "offset": 1}
    check_compiled(norms(ranks, dtype="bfloat16", **options))
