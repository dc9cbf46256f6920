"""Matrix multiplication of rows of one expert."""

from __future__ import annotations

import numpy as np

from etc_dist.functions.grouped_matmul import grouped_gated, grouped_store
from etc_dist.functions.matmul import silu


def test_rows_are_multiplied_by_the_experts_weights():
    rows, weights = np.array([[1, 2], [0, -1]]), np.array([[3, 1], [0, 2], [1, 0]])
    y = np.empty((2, 3), np.float32)
    grouped_store("float16").body(rows, weights, y)
    assert y.tolist() == [[5, 4, 1], [-1, -2, 0]]


def test_gated_rows_are_gathered_by_token():
    x, tokens = np.array([[0], [1], [2]], np.float32), np.array([2, 1])
    y = np.empty((2, 1), np.float32)
    grouped_gated("float16").body(x, np.array([[3]]), np.array([[1]]), tokens, y)
    np.testing.assert_allclose(y[:, 0], silu(np.array([6.0, 3.0])) * [2, 1])
