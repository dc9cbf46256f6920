"""The experts of one token."""

from __future__ import annotations

import numpy as np

from etc_dist.functions.pick_token import pick_token
from etc_dist.functions.routing import Routing

ROUTING = Routing(8, 2, True, "float32")


def test_the_best_expert_comes_first():
    ids, weights = np.empty((1, 2), np.int32), np.empty((1, 2), np.float32)
    logits = np.array([[0, 5, 0, 0, 5, 0, 0, 0]], np.float32)
    pick_token(ROUTING).body(logits, ids, weights)
    assert ids.tolist() == [[1, 4]]
    assert weights.tolist() == [[0.5, 0.5]]
