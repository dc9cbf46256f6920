"""An expert's tokens."""

from __future__ import annotations

import numpy as np

from etc_dist.functions.list_rows import list_rows
from etc_dist.functions.router import Router
from etc_dist.functions.routing import Routing


def test_tokens_are_listed_and_counted():
    routing = Routing(8, Router(2), "float32", block=4)
    words = np.array([0b1101, 0b11], np.int32)  # tokens 0, 2, 3, 4, 5 of two blocks
    before, tokens, count = np.zeros(2, int), np.full(32, -1), np.zeros((), int)
    list_rows(routing).body(words, before, tokens, count)
    assert before.tolist() == [0, 3]
    assert tokens.tolist() == [0, 2, 3, 4, 5] + [-1] * 27
    assert count == 5
