"""Tokens sent to the rank of their experts."""

from __future__ import annotations

import numpy as np

from etc_dist.functions.push_tokens import push_tokens
from etc_dist.functions.router import Router
from etc_dist.functions.routing import Routing

OWN = Routing(2, Router(2), "float32", split=True)  # experts 4 and 5 of four ranks
IDS = np.array([[7, 4], [0, 1], [5, 3]], np.int32)
LOWER = np.zeros(4, np.int32)  # the number of experts of ranks 0 and 1


def test_only_tokens_that_chose_the_ranks_experts_are_sent():
    x, target = np.arange(3)[:, None] * np.ones(2), np.full((3, 2), np.nan)
    push_tokens(OWN).body(x, IDS, LOWER, target)
    np.testing.assert_array_equal(target[:, 0], [0, np.nan, 2])
