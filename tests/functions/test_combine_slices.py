"""The results of slices of attention. `test_attend.py` tests both bodies."""

from __future__ import annotations

import numpy as np

from etc_dist.functions.combine_slices import combine_slices


def test_slices_count_by_their_weights():
    sums = np.array([[[[1.0], [6.0], [0.0]], [[0.0], [0.0], [0.0]]]], np.float32)
    none = (-np.inf, 0)
    stats = np.array([[[(3, 1), (2, 2), none], [none, none, none]]], np.float32)
    y = np.empty((1, 2), np.float32)
    combine_slices(1, "float32").body(sums, stats, y)
    assert y.tolist() == [[(1 + 6 / 2) / (1 + 2 / 2), 0]]
