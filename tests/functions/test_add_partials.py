"""Sums of partial results."""

from __future__ import annotations

import numpy as np

from etc_dist.functions.add_partials import add_partials

PARTIALS = np.array([[[1, 2]], [[3, -5]]], np.float32)


def test_partials_are_added():
    y = np.empty((1, 2), np.float32)
    add_partials("float32").body(PARTIALS, y)
    assert y.tolist() == [[4, -3]]
