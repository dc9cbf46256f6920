"""Sums of partial results."""

from __future__ import annotations

import numpy as np

from etc_dist.functions.add_partials import activate_partials, add_partials
from etc_dist.functions.matmul import silu

PARTIALS = np.array([[[1, 2]], [[3, -5]]], np.float32)


def test_partials_are_added():
    y = np.empty((1, 2), np.float32)
    add_partials("float32").body(PARTIALS, y)
    assert y.tolist() == [[4, -3]]


def test_activations_are_of_sums():
    active = np.empty((1, 2), np.float32)
    activate_partials("float16").body(PARTIALS, 2 * PARTIALS, active)
    np.testing.assert_allclose(active, silu(np.array([[4.0, -3.0]])) * [[8, -6]])
