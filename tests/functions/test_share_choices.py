"""The choices of a block of tokens, copied to a rank."""

from __future__ import annotations

import numpy as np

from etc_dist.functions.router import Router
from etc_dist.functions.routing import Routing
from etc_dist.functions.share_choices import share_choices


def test_choices_are_copied_unchanged():
    sources = np.array([1, 2]), np.array([[7, 4], [0, 1], [5, 3]]), np.ones((3, 2))
    copies = np.zeros(2), np.zeros((3, 2)), np.zeros((3, 2))
    share_choices(Routing(2, Router(2), "float32", split=True)).body(*sources, *copies)
    for source, target in zip(sources, copies, strict=True):
        np.testing.assert_array_equal(source, target)
