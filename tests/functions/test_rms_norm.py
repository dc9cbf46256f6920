"""RMSNorm: both bodies against fp64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from etc_dist.emulate import Emulator
from etc_dist.functions.rms_norm import (
    add_rms_norm,
    copy_norm,
    embed_norm,
    embed_rows,
    rms_norm,
)
from etc_dist.ir import Graph, graph_function, span
from etc_dist.runtime.cpu import simulate
from etc_dist.schedule import schedule_static
from tests.functions.compiled import check_compiled
from tests.layers.reference import draw

EPS = 1e-5


@graph_function
def norms(g: Graph, *, dtype: str) -> None:
    """y and z: RMSNorms of x, and of total = x + bias + residual, which is updated. v:
    RMSNorm of u, the rows `ids` of 3 x. q: RMSNorm of p, a copy of x. first,
    second: the rows `ids` of x."""
    rows, columns = g.dims("rows columns")
    shape = rows, columns
    x, gain = g.input("x", shape, dtype), g.input("gain", (2, columns), dtype)
    bias = g.input("bias", (2, columns), dtype)
    total = g.state("total", shape, dtype)
    y, z = g.output("y", shape, dtype), g.output("z", shape, dtype)
    ids = g.input("ids", (rows,), "int32")
    u, v = g.output("u", shape, dtype), g.output("v", shape, dtype)
    p, q = g.output("p", shape, dtype), g.output("q", shape, dtype)
    s, t = (g.output(name, shape, dtype) for name in ("first", "second"))
    (r,) = grid = g.grid(r=rows)
    own = span(r, 1), slice(None)
    g.call(
        copy_norm(dtype, EPS), grid, reads=[x[own], gain[1, :]], writes=[p[own], q[own]]
    )
    g.call(rms_norm(dtype, EPS), grid, reads=[x[own], gain[0, :]], writes=[y[own]])
    g.call(
        add_rms_norm(dtype, EPS, has_bias=True),
        grid,
        reads=[x[own], bias[1, :], total[own], gain[1, :]],
        writes=[total[own], z[own]],
    )
    g.call(
        embed_norm(dtype, EPS, scale=3.0, offset=1),
        grid,
        reads=[x[:, :], ids[span(r, 1)], gain[0, :]],
        writes=[u[own], v[own]],
    )
    reads = [x[:, :], ids[span(r, 1)]]
    g.call(embed_rows(dtype), grid, reads=reads, writes=[s[own], t[own]])


def expected(x: Any, gain: Any) -> Any:
    x = x.astype(np.float64)
    return x / np.sqrt((x**2).mean(axis=1, keepdims=True) + EPS) * gain.astype(float)


# Of the last ones a thread has vectors that it loads again.
@pytest.mark.parametrize(
    ("rows", "columns", "dtype"),
    [(3, 64, "float16"), (1, 5120, "bfloat16"), (2, 16648, "bfloat16")],
)
def test_rows_are_divided_by_their_root_mean_square(rows, columns, dtype, rng):
    x, total = (draw(rng, (rows, columns), dtype) for _ in range(2))
    given = {"x": x, "total": total, "gain": draw(rng, (2, columns), dtype)}
    given["bias"] = draw(rng, (2, columns), dtype)
    given["ids"] = np.array([rows - 1, -1, rows][:rows], np.int32)
    looked_up = x[[rows - 1, 0, 0][:rows]]
    graph, dims = norms(1, dtype=dtype), {"rows": rows, "columns": columns}
    for found in (
        simulate(schedule_static(graph), [given], dims).outputs[0],
        Emulator(graph, workers=2).run([given], dims)[0],
    ):
        parts = x, given["bias"][1], total
        sums = sum(part.astype(np.float32) for part in parts).astype(x.dtype)
        np.testing.assert_array_equal(found["total"], sums)
        for name in ("first", "second"):
            np.testing.assert_array_equal(found[name], looked_up)
        tripled = (looked_up.astype(np.float32) * 3).astype(x.dtype)
        np.testing.assert_array_equal(found["u"], tripled)
        np.testing.assert_array_equal(found["p"], x)
        norms_of = {"y": (x, 0), "z": (sums, 1), "q": (x, 1)}
        results = {n: expected(of, given["gain"][g]) for n, (of, g) in norms_of.items()}
        results["v"] = expected(tripled, 1 + given["gain"][0].astype(float))
        for name, wanted in results.items():
            error = np.abs(found[name].astype(np.float64) - wanted)
            assert np.all(error <= 2**-8 * np.abs(wanted) + 1e-6), name


def test_the_cuda_bodies_compile_without_spills():
    check_compiled(norms(1, dtype="bfloat16"))
