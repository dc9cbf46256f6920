"""The experts with the highest logits."""

from __future__ import annotations

import numpy as np

from etc_dist.functions.best_experts import best_experts


def test_equal_logits_prefer_the_smaller_expert():
    ids, weights = best_experts(np.array([[0, 2, 1, 2.0]]), 2, True)
    assert ids.tolist() == [[1, 3]]
    assert weights.tolist() == [[0.5, 0.5]]
