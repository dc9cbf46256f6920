"""The results of slices of attention. `test_attend.py` tests both bodies in a step."""

from __future__ import annotations

import numpy as np
import pytest

from etc_dist.emulate import Emulator
from etc_dist.functions.combine_slices import combine_slices
from tests.graphs.calls import one_call

COMBINED = one_call(
    1,
    combine_slices(64, "float16"),
    dims="slots cuts",
    reads=["sums slots 6 64 float32", "stats slots 6 4[:2] float32"],
    writes=["y 384 float16"],
)


def test_slices_count_by_their_weights():
    sums = np.array([[[1.0], [0.0]], [[6.0], [0.0]], [[np.nan], [np.nan]]], np.float32)
    none = (-np.inf, 0)
    stats = np.array([[(3, 1), none], [(2, 2), none], [none, none]], np.float32)
    y = np.empty(2, np.float32)
    combine_slices(1, "float32").body(sums, stats, y, cuts=1)
    assert y.tolist() == [(1 + 6 / 2) / (1 + 2 / 2), 0]
    body, sinks = combine_slices(1, "float32", has_sinks=True).body, [3 * np.log(2), 9]
    body(sums, stats, np.float32(sinks), y, cuts=1)
    np.testing.assert_allclose(y, [(1 + 6 / 2) / (1 + 2 / 2 + 1), 0], 1e-6)


@pytest.mark.parametrize("cuts", [0, 40])
def test_many_slices_are_combined_in_rounds(cuts, rng):
    sums = rng.standard_normal((40, 6, 64)).astype(np.float32)
    stats = rng.uniform(1, 9, (40, 6, 4)).astype(np.float32)
    stats[17, 2, :2] = -np.inf, 0
    stats[:, 4, :2] = -np.inf, 0
    if cuts == 0:  # of shares in the middle of a row
        stats[2::2, :, :2] = -np.inf, 0
    sums[stats[..., 1] == 0] = np.nan
    arrays = {"sums": sums, "stats": stats}
    dims = {"slots": 40, "cuts": cuts}
    [outputs] = Emulator(COMBINED).run([arrays], dims)
    reference = np.empty(6 * 64, np.float16)
    combine_slices(64, "float16").body(sums, stats[..., :2], reference, cuts=cuts)
    np.testing.assert_allclose(outputs["y"], reference, 2e-3, 1e-3)
    assert not reference[4 * 64 : 5 * 64].any()
