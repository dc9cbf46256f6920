"""The rows of a block's choices."""

from __future__ import annotations

import numpy as np

from etc_dist.functions.locate_rows import locate_rows
from etc_dist.functions.router import Router
from etc_dist.functions.routing import Routing


def test_rows_follow_those_of_earlier_tokens():
    # Experts 1, 3, 4 and 6 have rows from 0, 32, 64, 96 on, some of an earlier block.
    words = np.array([0, 0b11, 0, 0b01, 0, 0, 0b10, 0], np.int32)
    before = np.array([0, 3, 0, 2, 2, 0, 1, 0])
    row = np.array([0, 0, 0, 32, 64, 0, 96, 0])
    place = np.zeros((2, 2), np.int32)
    body = locate_rows(Routing(8, Router(2), "float32")).body
    body(np.array([[1, 3], [6, 1]]), words, before, row, place)
    assert place.tolist() == [[3, 34], [97, 4]]


def test_rows_of_other_ranks_have_no_place():
    routing = Routing(2, Router(2), "float32", split=True)  # of four ranks
    ids = np.array([[7, 4], [0, 1], [5, 3]])
    lower = np.zeros(4)  # the number of experts of ranks 0 and 1
    # Experts 4 and 5: tokens 0 and 2 chose one each, after 3 and 1 of earlier blocks.
    words, before = np.array([0b001, 0b100]), np.array([3, 1])
    place = np.zeros((3, 2), np.int32)
    rows = np.array([32, 96])
    locate_rows(routing).body(ids, words, before, rows, lower, place)
    assert place.tolist() == [[-1, 35], [-1, -1], [97, -1]]
