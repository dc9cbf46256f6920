"""Tiles of the rows of all experts."""

from __future__ import annotations

import numpy as np

from etc_dist.functions.plan_tiles import plan_tiles
from etc_dist.functions.router import Router
from etc_dist.functions.routing import Routing


def test_tiles_are_full_but_the_last():
    routing = Routing(8, Router(2), "float32", tile_rows=4)
    expert_row, (expert, row, rows, first) = np.zeros(8, int), np.full((4, 7), -1)
    counts = np.array([0, 5, 0, 0, 0, 0, 2, 0])  # two tiles, and one
    body = plan_tiles(routing).body
    num_tiles = np.zeros(1, int)
    body(counts, np.zeros(32), expert_row, expert, row, rows, first, num_tiles)
    assert expert.tolist() == [1, 1, 6, 0, 0, 0, 0]
    assert row.tolist() == [0, 4, 16, 0, 0, 0, 0]
    assert rows.tolist() == [4, 1, 2, 0, 0, 0, 0]
    assert first.tolist() == [32, 36, 192, 0, 0, 0, 0]
    assert expert_row[[1, 6]].tolist() == [0, 16] and num_tiles == 1  # groups of four
