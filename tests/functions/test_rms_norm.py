"""RMSNorm: both bodies against fp64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from etc_dist.functions.rms_norm import (
    add_rms_norm,
    copy_norm,
    embed_norm,
    embed_rows,
    rms_norm,
)
from tests.functions.both import both
from tests.functions.compiled import check_compiled
from tests.graphs.calls import Task, calls
from tests.layers.reference import draw

EPS = 1e-5


def norms(dtype):
    """y and z: RMSNorms of x, and of total = x + bias + residual, which is updated. v:
    RMSNorm of u, the rows `ids` of 3 x. q: RMSNorm of p, a copy of x. first,
    second: the rows `ids` of x."""
    x, y, z, total, u, v, p, q, first, second = (
        f"{name} rows/1 columns {dtype}"
        for name in ["x", "y", "z", "total", "u", "v", "p", "q", "first", "second"]
    )
    gain, source, bias = (
        f"{n} columns {dtype}" for n in ("gain 2[0]", "gain 2[1]", "bias 2[1]")
    )
    of_ids = [f"x rows columns {dtype}", "ids rows/1 int32"]
    norm_of_sum = add_rms_norm(dtype, EPS, has_bias=True)
    looked_up = embed_norm(dtype, EPS, scale=3.0, offset=1)
    tasks = [
        Task(copy_norm(dtype, EPS), [x, source], [p, q]),
        Task(rms_norm(dtype, EPS), [x, gain], [y]),
        Task(norm_of_sum, [x, bias, total, source], [total, z]),
        Task(looked_up, [*of_ids, gain], [u, v]),
        Task(embed_rows(dtype), of_ids, [first, second]),
    ]
    return calls(1, tasks=tasks)


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
    arrays = {"x": x, "total": total, "gain": draw(rng, (2, columns), dtype)}
    arrays["bias"] = draw(rng, (2, columns), dtype)
    arrays["ids"] = np.array([rows - 1, -1, rows][:rows], np.int32)
    looked_up = x[[rows - 1, 0, 0][:rows]]
    for outputs in both(norms(dtype), arrays, {"rows": rows, "columns": columns}):
        parts = x, arrays["bias"][1], total
        sums = sum(part.astype(np.float32) for part in parts).astype(x.dtype)
        np.testing.assert_array_equal(outputs["total"], sums)
        for name in ("first", "second"):
            np.testing.assert_array_equal(outputs[name], looked_up)
        tripled = (looked_up.astype(np.float32) * 3).astype(x.dtype)
        np.testing.assert_array_equal(outputs["u"], tripled)
        np.testing.assert_array_equal(outputs["p"], x)
        norms_of = {"y": (x, 0), "z": (sums, 1), "q": (x, 1)}
        results = {
            n: expected(of, arrays["gain"][g]) for n, (of, g) in norms_of.items()
        }
        results["v"] = expected(tripled, 1 + arrays["gain"][0].astype(float))
        for name, reference in results.items():
            error = np.abs(outputs[name].astype(np.float64) - reference)
            assert np.all(error <= 2**-8 * np.abs(reference) + 1e-6), name


def test_the_cuda_bodies_compile_without_spills():
    check_compiled(norms("bfloat16"))
