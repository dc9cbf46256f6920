"""RMSNorm of a sum over ranks: both bodies against fp64."""

from __future__ import annotations

import numpy as np
import pytest

from etc_dist.emulate import Emulator
from etc_dist.functions.add_ranks_norm import add_ranks_norm
from etc_dist.ir import Graph, graph_function, span
from etc_dist.runtime.cpu import simulate
from etc_dist.schedule import schedule_static
from tests.functions.compiled import check_compiled
from tests.functions.test_rms_norm import EPS, expected
from tests.layers.reference import draw


@graph_function
def norms(g: Graph, *, dtype: str, has_bias: bool) -> None:
    """y: RMSNorm of total = parts[0] + parts[1] + ... + total, which is updated; with
    has_bias, of this sum and that."""
    rows, columns = g.dims("rows columns")
    parts = g.input("parts", (g.world_size, rows, columns), dtype)
    gain, bias = (g.input(name, (columns,), dtype) for name in ("gain", "bias"))
    total = g.state("total", (rows, columns), dtype)
    y = g.output("y", (rows, columns), dtype)
    (r,) = grid = g.grid(r=rows)
    own = span(r, 1), slice(None)
    g.call(
        add_ranks_norm(dtype, EPS, has_bias=has_bias),
        grid,
        reads=[parts[:, *own], *([bias[:]] * has_bias), total[own], gain[:]],
        writes=[total[own], y[own]],
    )


# Of the last one a thread has vectors that it loads again.
@pytest.mark.parametrize(
    ("ranks", "columns", "dtype", "has_bias"),
    [
        (2, 64, "float16", True),
        pytest.param(5, 2120, "bfloat16", True, marks=pytest.mark.exhaustive),
        (8, 8264, "bfloat16", False),
    ],
)
def test_parts_are_added_in_rank_order(ranks, columns, dtype, has_bias, rng):
    parts, total = draw(rng, (ranks, 2, columns), dtype), draw(rng, (2, columns), dtype)
    given = {"parts": parts, "total": total, "gain": draw(rng, (columns,), dtype)}
    given["bias"] = draw(rng, (columns,), dtype)
    graph = norms(ranks, dtype=dtype, has_bias=has_bias)
    dims = {"rows": 2, "columns": columns}
    wide = np.zeros((2, columns), np.float32)
    for array in (*parts, *([given["bias"]] * has_bias), total):
        wide += array.astype(np.float32)
    sums = wide.astype(total.dtype)
    wanted = expected(sums, given["gain"])
    for found in (
        simulate(schedule_static(graph), [given] * ranks, dims).outputs[-1],
        Emulator(graph, workers=2).run([given] * ranks, dims)[-1],
    ):
        np.testing.assert_array_equal(found["total"], sums)
        error = np.abs(found["y"].astype(np.float64) - wanted)
        assert np.all(error <= 2**-8 * np.abs(wanted) + 1e-6)


@pytest.mark.parametrize("ranks", [8, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_the_cuda_bodies_compile_without_spills(ranks):
    check_compiled(norms(ranks, dtype="bfloat16", has_bias=ranks == 8))
