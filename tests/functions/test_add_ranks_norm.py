"""RMSNorm of a sum over ranks: both bodies against fp64."""

from __future__ import annotations

import numpy as np
import pytest

from etc_dist.functions.add_ranks_norm import add_ranks_norm
from tests.functions.both import both_on_ranks
from tests.functions.compiled import check_compiled
from tests.functions.test_rms_norm import EPS, expected
from tests.graphs.calls import one_call
from tests.layers.reference import draw


def norms(ranks, dtype, has_bias):
    """y: RMSNorm of total = parts[0] + parts[1] + ... + total, which is updated; with
    has_bias, of this sum and that."""
    total = f"total rows/1 columns {dtype}"
    return one_call(
        ranks,
        add_ranks_norm(dtype, EPS, has_bias=has_bias),
        reads=[
            f"parts ranks rows/1 columns {dtype}",
            *[f"bias columns {dtype}"] * has_bias,
            *(total, f"gain columns {dtype}"),
        ],
        writes=[total, f"y rows/1 columns {dtype}"],
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
    arrays = {"parts": parts, "total": total, "gain": draw(rng, (columns,), dtype)}
    if has_bias:
        arrays["bias"] = draw(rng, (columns,), dtype)
    dims = {"rows": 2, "columns": columns}
    wide = np.zeros((2, columns), np.float32)
    for array in (*parts, arrays.get("bias", np.zeros(columns)), total):
        wide += array.astype(np.float32)
    sums = wide.astype(total.dtype)
    norm = expected(sums, arrays["gain"])
    graph = norms(ranks, dtype, has_bias)
    for *_, outputs in both_on_ranks(graph, [arrays] * ranks, dims):
        np.testing.assert_array_equal(outputs["total"], sums)
        error = np.abs(outputs["y"].astype(np.float64) - norm)
        assert np.all(error <= 2**-8 * np.abs(norm) + 1e-6)


@pytest.mark.parametrize("ranks", [8, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_the_cuda_bodies_compile_without_spills(ranks):
    check_compiled(norms(ranks, "bfloat16", has_bias=ranks == 8))
