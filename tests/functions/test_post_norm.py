"""RMSNorm of what is added to a residual: both bodies against fp64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from etc_dist.functions.post_norm import post_norm, post_ranks_norm
from tests.conftest import first_always
from tests.functions.both import both_on_ranks
from tests.functions.compiled import check_compiled
from tests.functions.test_rms_norm import EPS, expected
from tests.graphs.calls import one_call
from tests.layers.reference import draw


def norms(ranks, dtype, has_bias, normalizes_sum, offset):
    """total, which is updated, and y of `post_norm`; on several ranks of parts."""
    make = post_ranks_norm if ranks > 1 else post_norm
    options = {"has_bias": has_bias, "normalizes_sum": normalizes_sum}
    total = f"total rows/1 columns {dtype}"
    return one_call(
        ranks,
        make(dtype, EPS, offset=offset, **options),
        reads=[
            f"parts {'ranks' if ranks > 1 else '1[0]'} rows/1 columns {dtype}",
            *[f"gains 3[2] columns {dtype}"] * has_bias,
            *(total, f"gains 3[0] columns {dtype}"),
            *[f"gains 3[1] columns {dtype}"] * normalizes_sum,
        ],
        writes=[total, f"y rows/1 columns {dtype}"],
    )


def reference(
    arrays: Any, has_bias: bool, normalizes_sum: bool, offset: int
) -> tuple[Any, Any]:
    gains = arrays["gains"].astype(np.float64) + offset
    x = arrays["parts"].astype(np.float32).sum(axis=0)
    x = x + arrays["gains"][2].astype(np.float32) if has_bias else x
    x = x.astype(arrays["total"].dtype)
    total = expected(x, gains[0]) + arrays["total"].astype(np.float64)
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
    arrays = {
        "parts": draw(rng, (ranks, 2, columns), dtype),
        "gains": draw(rng, (3, columns), dtype),
        "total": draw(rng, (2, columns), dtype),
    }
    options = {"has_bias": has_bias, "normalizes_sum": normalizes_sum}
    options["offset"] = offset
    graph, dims = norms(ranks, dtype, **options), {"rows": 2, "columns": columns}
    references = dict(zip(("total", "y"), reference(arrays, **options), strict=True))
    for *_, outputs in both_on_ranks(graph, [arrays] * ranks, dims):
        for name, of in references.items():
            error = np.abs(outputs[name].astype(np.float64) - of)
            assert np.all(error <= 2**-7 * np.abs(of) + 2**-7), name


@pytest.mark.parametrize("ranks", first_always([(4,), (1,)], 1))
def test_the_cuda_bodies_compile_without_spills(ranks):
    options = {"has_bias": True, "normalizes_sum": True, "offset": 1}
    check_compiled(norms(ranks, "bfloat16", **options))
