"""Sums of parts into several places: both bodies."""

from __future__ import annotations

import numpy as np
import pytest

from etc_dist.emulate import Emulator
from etc_dist.functions.share_sum import share_sum
from etc_dist.ir import Graph, graph_function, tile
from etc_dist.ir.tensor import numpy_dtype
from etc_dist.runtime.cpu import simulate
from etc_dist.schedule import schedule_static

COLUMNS, PIECE = 8 * 700, 8 * 600  # three vectors of a thread; a last piece of 100


@graph_function
def sums(g: Graph, *, dtype: str, parts: int, result: str, residual: bool) -> None:
    """y and copy: the sum of x [parts, columns], and of the residual."""
    (columns,) = (g.dims("columns"),)
    x = g.input("x", (parts, columns), dtype)
    last = [g.input("last", (columns,), result)] if residual else []
    y, copy = (g.output(name, (columns,), result) for name in ("y", "copy"))
    (i,) = grid = g.grid(i=-(-COLUMNS // PIECE))
    own = tile(i, PIECE)
    g.call(
        share_sum(dtype, parts, 2, result=result, has_residual=residual),
        grid,
        reads=[x[:, own] if parts > 1 else x[0, own], *(r[own] for r in last)],
        writes=[y[own], copy[own]],
    )


@pytest.mark.parametrize(
    ("dtype", "result", "parts", "residual"),
    [
        ("bfloat16", "bfloat16", 1, False),
        ("float16", "float16", 5, True),
        ("bfloat16", "float32", 3, False),
        ("float32", "bfloat16", 2, True),
        pytest.param("bfloat16", "bfloat16", 8, True, marks=pytest.mark.exhaustive),
        pytest.param("bfloat16", "float32", 1, False, marks=pytest.mark.exhaustive),
    ],
)
def test_parts_are_added_in_order_and_rounded_once(dtype, result, parts, residual, rng):
    shape = parts, COLUMNS
    wide = rng.standard_normal(shape) * 2.0 ** rng.integers(-9, 9, shape)
    given = {"x": wide.astype(numpy_dtype(dtype))}
    total = np.zeros(COLUMNS, np.float32)
    for part in given["x"]:
        total += part.astype(np.float32)
    if residual:
        given["last"] = rng.standard_normal(COLUMNS).astype(numpy_dtype(result))
        total += given["last"].astype(np.float32)
    graph = sums(1, dtype=dtype, parts=parts, result=result, residual=residual)
    dims = {"columns": COLUMNS}
    for found in (
        simulate(schedule_static(graph), [given], dims).outputs[0],
        Emulator(graph, workers=2).run([given], dims)[0],
    ):
        for y in (found["y"], found["copy"]):
            np.testing.assert_array_equal(y, total.astype(numpy_dtype(result)))
