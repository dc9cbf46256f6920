"""The choices of rows; test_route_rows.py runs both bodies."""

from __future__ import annotations

import numpy as np

from etc_dist.functions.choose_rows import choose_rows
from etc_dist.functions.routing import Routing


def test_a_row_of_no_request_has_no_experts():
    logits = np.array([[0, 2, 2, 1, 0, 0, 0, 0]] * 2, np.float32)
    ids, weights = np.full((2, 2), 9, np.int32), np.ones((2, 2), np.float32)
    position = np.array([-1, 0], np.int32)
    choose_rows(Routing(8, 2, True, "bfloat16")).body(logits, position, ids, weights)
    assert ids.tolist() == [[-1, -1], [1, 2]]
    assert weights.tolist() == [[0, 0], [0.5, 0.5]]
