"""Copies of rows."""

from __future__ import annotations

import numpy as np

from etc_dist.functions.push_rows import push_rows


def test_rows_are_copied():
    x, y = np.arange(6).reshape(2, 3), np.zeros((2, 3), int)
    push_rows().body(x, y)
    assert y.tolist() == x.tolist()
