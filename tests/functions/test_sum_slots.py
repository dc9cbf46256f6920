"""The reduction of a reduce-scatter."""

from __future__ import annotations

import numpy as np

from etc_dist.functions.sum_slots import sum_slots


def test_slots_are_added_in_rank_order_and_rounded_once():
    slots = np.zeros((3, 1, 1, 2, 2), np.float16)
    slots[:, 0, 0] = np.array([2048, 1, 1])[:, None, None]  # 2049 is no float16
    y = np.zeros((1, 2), np.float16)
    sum_slots("float16").body(slots[:, 0, 0], y)
    assert y.tolist() == [[2050, 2050]]
