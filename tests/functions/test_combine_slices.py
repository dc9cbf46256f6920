"""The results of slices of attention. `test_attend.py` tests both bodies in a step."""

from __future__ import annotations

import numpy as np
import pytest

from etc_dist.emulate import Emulator
from etc_dist.functions.combine_slices import combine_slices
from etc_dist.ir import graph_function, span


@graph_function
def combined(g):
    slots, heads, _cuts = g.dims("slots heads cuts")
    sums = g.input("sums", (slots, heads, 64), "float32")
    stats = g.input("stats", (slots, heads, 4), "float32")  # inputs need it
    y = g.output("y", (heads * 64,), "float16")
    reads = [sums[:, :, :], stats[:, :, span(0, 2)]]
    g.call(combine_slices(64, "float16"), g.grid(one=1), reads=reads, writes=[y[:]])


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
    given = {"sums": sums, "stats": stats}
    dims = {"slots": 40, "heads": 6, "cuts": cuts}
    [found] = Emulator(combined(1)).run([given], dims)
    wanted = np.empty(6 * 64, np.float16)
    combine_slices(64, "float16").body(sums, stats[..., :2], wanted, cuts=cuts)
    np.testing.assert_allclose(found["y"], wanted, 2e-3, 1e-3)
    assert not wanted[4 * 64 : 5 * 64].any()
