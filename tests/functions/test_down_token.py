"""The second GEMV of one token."""

from __future__ import annotations

import numpy as np

from etc_dist.functions.down_token import down_token
from etc_dist.functions.router import Router
from etc_dist.functions.routing import Routing


def test_results_of_the_tokens_experts_are_weighted():
    down = np.array([1, 2, 3, 4], np.float32)[:, None, None]  # of four experts
    ids, weights = np.array([[3, 0]]), np.array([[0.75, 0.25]])
    active, y = np.array([[[2.0], [8.0]]]), np.empty((1, 1), np.float32)
    body = down_token(Routing(4, Router(2), "float32")).body
    body(ids, weights, active, down, y)
    assert y.tolist() == [[8.0]]
