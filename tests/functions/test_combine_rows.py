"""Weighted sums of tokens' rows."""

from __future__ import annotations

import numpy as np
import pytest

from etc_dist.functions.combine_rows import combine_rows
from etc_dist.functions.router import Router
from etc_dist.functions.routing import Routing
from tests.functions.both import both
from tests.graphs.calls import one_call
from tests.layers.reference import draw

ROUTING = Routing(8, Router(2), "float32")
OWN = Routing(2, Router(2), "float32", split=True)


def test_a_product_and_its_sum_are_rounded_once():
    near = 1 + 2.0**-12  # near * near is 1 + 2**-11 + 2**-24, a digit too long
    outputs = np.array([[near], [-1 - 2.0**-11]], np.float32)
    weights = np.array([[near, 1.0]], np.float32)
    place, y = np.array([[0, 1]], np.int32), np.empty((1, 1), np.float32)
    combine_rows(ROUTING).body(place, weights, outputs, y)
    assert y.tolist() == [[0.0]]
    combine_rows(ROUTING).body(place[:, ::-1], weights[:, ::-1], outputs, y)
    assert y.tolist() == [[2.0**-24]]


def test_tokens_without_rows_are_not_written():
    place = np.array([[-1, 1], [-1, -1], [0, -1]], np.int32)
    weights, outputs = np.full((3, 2), 0.5, np.float32), np.array([[2.0], [4.0]])
    y = np.full((3, 1), np.nan)
    combine_rows(OWN).body(place, weights, outputs, y)
    np.testing.assert_array_equal(y[:, 0], [2, np.nan, 1])


@pytest.mark.parametrize("top_k", [2, 3])
def test_both_bodies_have_equal_bits(top_k, rng):
    """Columns of several passes. Of two choices, a part is summed after the other."""
    combined = one_call(
        1,
        combine_rows(Routing(8, Router(top_k), "bfloat16")),
        [f"place tokens/2 {top_k} int32", f"weights tokens/2 {top_k} float32",
         "outputs rows columns bfloat16"],
        ["y tokens/2 columns bfloat16"],
    )  # fmt: skip
    reads = {
        "place": rng.integers(9, size=(5, top_k), dtype=np.int32),
        "weights": draw(rng, (5, top_k), "float32"),
        "outputs": draw(rng, (9, 1096), "bfloat16"),
    }
    expected, actual = both(combined, reads, {"tokens": 5, "rows": 9, "columns": 1096})
    np.testing.assert_array_equal(actual["y"], expected["y"])
