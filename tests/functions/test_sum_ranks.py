"""Sums over ranks."""

from __future__ import annotations

import numpy as np

from etc_dist.functions.router import Router
from etc_dist.functions.routing import Routing
from etc_dist.functions.sum_ranks import sum_expert_ranks, sum_ranks

OWN = Routing(2, Router(2), "float32", split=True)  # experts 4 and 5 of four ranks
IDS = np.array([[7, 4], [0, 1], [5, 3]], np.int32)


def test_partial_sums_of_all_ranks_are_added():
    y = np.full((3, 1), np.nan)
    sum_ranks("bfloat16").body(np.arange(12).reshape(4, 3, 1), y)
    assert y[:, 0].tolist() == [18, 22, 26]


def test_only_partial_sums_of_chosen_ranks_are_added():
    partials = np.full((4, 3, 1), np.nan)
    partials[[2, 3, 0, 1, 2], [0, 0, 1, 2, 2]] = np.array([[1], [2], [4], [8], [16]])
    y = np.full((3, 1), np.nan)
    sum_expert_ranks(OWN, 4).body(partials, IDS, np.empty(0), y)
    assert y[:, 0].tolist() == [3, 4, 24]


def test_only_partial_sums_of_the_host_are_added():
    y, lower = np.full((3, 1), 7.0), np.empty(4)  # of the second of two hosts
    partials = np.array([[1, 2, 4], [8, 16, 32]])[:, :, None]
    sum_expert_ranks(OWN, 2).body(partials, IDS, lower, y)
    assert y[:, 0].tolist() == [9, 7, 4]


def test_the_own_part_is_read_in_its_place():
    partials, y = np.full((3, 2, 1), 1.0), np.full((2, 1), np.nan)
    partials[1] = np.nan
    rank_part = np.array([[4.0], [8.0]])
    sum_ranks("bfloat16", has_own=True).body(partials, rank_part, y, rank=1)
    assert y[:, 0].tolist() == [6, 10]
