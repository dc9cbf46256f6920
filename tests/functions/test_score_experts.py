"""Logits of a block of tokens."""

from __future__ import annotations

import numpy as np

from etc_dist.functions.router import Router
from etc_dist.functions.routing import Routing
from etc_dist.functions.score_experts import score_experts

ROUTING = Routing(8, Router(2), "float32")


def test_logits_are_products_of_tokens_and_experts():
    x, router = np.array([[1, 2], [0, -1]]), np.array([[3, 1], [0, 2], [1, 0]])
    logits = np.empty((2, 3), np.float32)
    score_experts(ROUTING).body(x, router, logits)
    assert logits.tolist() == [[5, 4, 1], [-1, -2, 0]]
