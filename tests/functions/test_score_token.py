"""Logits of one token."""

from __future__ import annotations

import numpy as np

from etc_dist.functions.router import Router
from etc_dist.functions.routing import Routing
from etc_dist.functions.score_token import score_token

ROUTING = Routing(8, Router(2), "float32")


def test_logits_are_products_of_the_token_and_experts():
    x, router = np.array([[1, 2]]), np.array([[3, 1], [0, 2]])
    logits = np.empty((1, 2), np.float32)
    score_token(ROUTING).body(x, router, logits)
    assert logits.tolist() == [[5, 4]]
