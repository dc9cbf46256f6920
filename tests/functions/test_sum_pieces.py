"""Sums of pieces of tiles."""

from __future__ import annotations

import numpy as np

from etc_dist.functions.sum_pieces import sum_pieces


def test_pieces_are_added_in_order_and_rounded_once():
    pieces = np.array([2048, 1, 1], np.float16)[:, None, None]  # 2049 is no float16
    y = np.zeros((1, 1), np.float16)
    sum_pieces("float16", "float16").body(pieces, y)
    assert y.tolist() == [[2050]]


def test_only_elements_of_both_sides_are_summed():
    y = np.full((3, 2), 7, np.float32)
    sum_pieces("float32", "float32").body(np.ones((2, 2, 3), np.float32), y)
    assert y.tolist() == [[2, 2], [2, 2], [7, 7]]
