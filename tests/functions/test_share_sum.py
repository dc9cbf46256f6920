"""Sums of parts into several places: both bodies."""

from __future__ import annotations

import numpy as np
import pytest

from etc_dist.functions.share_sum import share_sum
from etc_dist.ir.tensor import numpy_dtype
from tests.functions.both import both
from tests.graphs.calls import one_call

COLUMNS, PIECE = 8 * 700, 8 * 600  # three vectors of a thread; a last piece of 100


def sums(dtype, parts, result, residual):
    """y and copy: the sum of x [parts, columns], and of the residual."""
    return one_call(
        1,
        share_sum(dtype, parts, 2, result=result, has_residual=residual),
        reads=[f"x {parts if parts > 1 else '1[0]'} columns/{PIECE} {dtype}"]
        + [f"last columns/{PIECE} {result}"] * residual,
        writes=[f"{name} columns/{PIECE} {result}" for name in ("y", "copy")],
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
    arrays = {"x": wide.astype(numpy_dtype(dtype))}
    total = np.zeros(COLUMNS, np.float32)
    for part in arrays["x"]:
        total += part.astype(np.float32)
    if residual:
        arrays["last"] = rng.standard_normal(COLUMNS).astype(numpy_dtype(result))
        total += arrays["last"].astype(np.float32)
    graph = sums(dtype, parts, result, residual)
    for outputs in both(graph, arrays, {"columns": COLUMNS}):
        for y in (outputs["y"], outputs["copy"]):
            np.testing.assert_array_equal(y, total.astype(numpy_dtype(result)))
