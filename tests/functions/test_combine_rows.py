"""Weighted sums of tokens' rows."""

from __future__ import annotations

import numpy as np

from etc_dist.functions.combine_rows import combine_rows
from etc_dist.functions.router import Router
from etc_dist.functions.routing import Routing

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
