"""Rotary embeddings of heads. `test_attend.py` tests the CUDA half."""

from __future__ import annotations

import numpy as np

from etc_dist.functions.rotary import frequencies, rotary_table, rotated
from tests.graphs.paged import BASE, EPS, turned


def test_heads_are_normalized_and_rotated(rng):
    table = rotary_table(2048, frequencies(64, BASE))
    head, gain = rng.standard_normal((2, 64)).astype(np.float32)
    for position in (0, 1, 2047):
        for head_gain in (None, gain):
            y = rotated(head, table[position], head_gain, EPS)
            np.testing.assert_allclose(
                y, turned(head, position, head_gain), rtol=1e-4, atol=1e-5
            )
