"""The steps between ranks, one by one, on small literal numbers."""

from __future__ import annotations

from typing import Any

import numpy as np

from etc_dist.ops.dispatch import push_tokens, share_choices, sum_parts
from etc_dist.ops.routing import Routing, combine_rows, locate_rows

WHOLE = Routing(8, 2, True, "float32")
OWN = Routing(2, 2, True, "float32", split=True)  # of four ranks
IDS = np.array([[7, 4], [0, 1], [5, 3]], np.int32)
LOWER = np.zeros(4, np.int32)  # as many as there are experts of ranks 0 and 1


def nan(*shape: int) -> Any:
    return np.full(shape, np.nan)


def test_choices_are_told_as_they_are():
    sent = np.array([1, 2]), IDS, np.ones((3, 2))
    told = np.zeros(2), np.zeros((3, 2)), np.zeros((3, 2))
    share_choices(OWN).body(*sent, *told)
    for source, target in zip(sent, told, strict=True):
        np.testing.assert_array_equal(source, target)


def test_only_tokens_that_chose_the_ranks_experts_are_sent():
    x, target = np.arange(3)[:, None] * np.ones(2), nan(3, 2)
    push_tokens(OWN).body(x, IDS, LOWER, target)
    np.testing.assert_array_equal(target[:, 0], [0, np.nan, 2])


def test_rows_of_other_ranks_are_nowhere():
    # Experts 4 and 5: tokens 0 and 2 chose one each, after 3 and 1 of earlier blocks.
    chosen, before = np.array([0b001, 0b100]), np.array([3, 1])
    place = np.zeros((3, 2), np.int32)
    rows = np.array([32, 96])
    locate_rows(OWN).body(IDS, chosen, before, rows, LOWER, place)
    assert place.tolist() == [[-1, 35], [-1, -1], [97, -1]]


def test_tokens_without_own_rows_are_left_alone():
    place = np.array([[-1, 1], [-1, -1], [0, -1]], np.int32)
    weights, product = np.full((3, 2), 0.5, np.float32), np.array([[2.0], [4.0]])
    y = nan(3, 1)
    combine_rows(OWN).body(place, weights, product, y)
    np.testing.assert_array_equal(y[:, 0], [2, np.nan, 1])


def test_parts_of_all_ranks_are_added():
    y = nan(3, 1)
    sum_parts(WHOLE).body(np.arange(12).reshape(4, 3, 1), y)
    assert y[:, 0].tolist() == [18, 22, 26]


def test_only_parts_of_ranks_that_were_chosen_are_added():
    parts = nan(4, 3, 1)
    parts[[2, 3, 0, 1, 2], [0, 0, 1, 2, 2]] = np.array([[1], [2], [4], [8], [16]])
    y = nan(3, 1)
    sum_parts(OWN).body(parts, IDS, y)
    assert y[:, 0].tolist() == [3, 4, 24]
