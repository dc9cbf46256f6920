"""Equal shares of the positions of rows: what each has, and both bodies."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from etc_dist.emulate import Emulator
from etc_dist.functions.append_kv import EVERY_POSITION, PagedCache
from etc_dist.functions.plan_shares import (
    BOUND,
    CUT,
    EXTENT,
    MOST_CUTS,
    SLACK,
    STAGE,
    bounds_of,
    plan_shares,
    slices_of,
    stages_of,
)
from tests.functions.both import both
from tests.functions.compiled import check_compiled
from tests.graphs.calls import one_call

PAGED = PagedCache(64, 16, has_span=True)
WINDOWS = [EVERY_POSITION, 1000]
BLOCK_ROWS = 20
NAMES = "extents", "bounds", "combined", "num_combined", "blocks"
EVERY, BOUNDS = "span(0, minimum(512, rows))", "span(0, minimum(1024, shares) + 1)"
PLANNED = one_call(
    1,
    plan_shares(PAGED, BLOCK_ROWS),
    [
        "window 2 int32",
        "cos_sin positions 64 float32",
        f"request rows[{EVERY}] int32",
        f"position rows[{EVERY}] int32",
        "table requests most_pages int32",
    ],
    [
        f"extents rows[{EVERY}] {EXTENT} int32",
        f"bounds[{BOUNDS}, :]",
        "combined most 3 int32",
        "num_combined 1 int32",
        "blocks entries 2 int32",
    ],
    dims="rows positions requests most_pages pages shares most lists cuts entries",
    parts=f"output bounds [shares + 1, {BOUND}] int32",
)


def given_for(lengths, window, shares, lists, cuts):
    """Inputs and dims of rows of these lengths, each of another request."""
    lengths = np.array(lengths)
    num_rows, most_pages = len(lengths), max(1, -(-int(lengths.max()) // 16))
    arrays = {
        "window": np.array([window, 0], np.int32),
        "cos_sin": np.zeros((most_pages * 16, 64), np.float32),
        "request": np.arange(num_rows, dtype=np.int32),
        "position": (lengths - 1).astype(np.int32),
        "table": np.zeros((num_rows, most_pages), np.int32),
    }
    dims = {"shares": shares, "lists": lists, "cuts": cuts, "pages": 1}
    dims |= {"most": max(shares, num_rows), "rows": num_rows, "requests": num_rows}
    dims |= {"entries": 1}
    return arrays, dims | {"positions": most_pages * 16, "most_pages": most_pages}


def extents_of(lengths, window=EVERY_POSITION):
    lengths = np.array(lengths)
    requests, begin = np.arange(len(lengths)), np.maximum(lengths - window, 0)
    # All rows write to the only page.
    extents = np.stack([begin, lengths, begin // 16 * 16, requests], axis=1)
    return np.where(lengths[:, None] > 0, extents, 0)


def cuts_of(lengths, in_order):
    if not in_order:
        return 0
    return min(MOST_CUTS, max(1, -(-int(max(lengths)) // (CUT * STAGE))))


LENGTHS = [STAGE * n - STAGE // 2 * (n > 0) for n in (0, 1, 2, 7, 17, 40)]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize(("shares", "lists"), [(1, 1), (2, 1), (6, 2), (15, 1)])
def test_the_slices_of_a_row_are_adjacent_and_have_slots_in_order(
    shares, lists, in_order, window
):
    plan = plan_shares(PAGED)
    for lengths in product(LENGTHS, repeat=3):
        cuts = cuts_of(lengths, in_order)
        arrays, dims = given_for(lengths, window, shares, lists, cuts)
        out = [np.zeros(n, np.int32) for n in ((3, EXTENT), (shares + 1, BOUND))]
        out += [np.zeros((dims["most"], 3), np.int32), np.zeros(1, np.int32)]
        plan.body(*arrays.values(), *out, pages=1, lists=lists, cuts=cuts)
        extents, bounds, combined, (count,) = out
        np.testing.assert_array_equal(extents, extents_of(lengths, window))
        # Two tasks write different rows and slots.
        assert (np.diff(bounds[:, 0] * 2**20 + bounds[:, 1]) >= 0).all()
        assert (np.diff(bounds[:, 2:], axis=0) >= 0).all()
        slices_of_rows = {row: [] for row in range(3)}
        for share in range(shares):
            for row, *slice_ in slices_of(extents, bounds, share, cuts):
                slices_of_rows[row].append(slice_)
        slots = {row: range(slot, slot + n) for row, slot, n in combined[:count]}
        for row, slices in slices_of_rows.items():
            at = [extents[row, 0], *(end for _, end, _ in slices)]
            assert [first for first, *_ in slices] == at[:-1]
            assert at[-1] == lengths[row]
            row_slots = [slot for *_, slot in slices]
            assert (
                row_slots == [None]
                if row not in slots
                else row_slots == sorted(set(row_slots))
            )
            assert row not in slots or (
                len(row_slots) > 1 and {*row_slots} <= {*slots[row]}
            )
        all_slots = [slot for of_row in slots.values() for slot in of_row]
        assert len(all_slots) == len(set(all_slots))


def test_shares_are_equal_unless_whole_rows_are_nearly_so():
    extents = extents_of([2048, 32, 700, 32, 1500, 64, 300, 32] * 4)
    total = (stages_of(extents) + 1).sum()
    bounds = bounds_of(extents, 24, 2, 0)
    assert np.diff(bounds[:, 2]).max() <= -(-total // 24)
    equal = 127 * [512]
    for last, divides in ((512, False), (512 + SLACK * STAGE, False), (2048, True)):
        bounds = bounds_of(extents_of([*equal, last]), 32, 2, 0)
        assert bounds[:, 1].any() == divides


def test_in_order_a_row_is_cut_alike_in_each_batch(rng):
    cut = set()
    for _ in range(20):
        lengths = np.append(rng.integers(1, 5000, rng.integers(1, 40)), 3000)
        extents = extents_of(lengths)
        bounds = bounds_of(extents, 12, 2, 5)
        slices = [s for n in range(12) for s in slices_of(extents, bounds, n, 5)]
        ends = [s[1:3] for s in slices if s[0] == len(lengths) - 1]
        cut.add(tuple(ends))
    assert cut == {((0, 1024), (1024, 2048), (2048, 3000))}


def test_long_rows_have_a_limited_number_of_slices():
    extents = extents_of([32768, 32769])
    bounds = bounds_of(extents, 1, 1, 16)
    slices = [*slices_of(extents, bounds, 0, 16)]
    assert [slot for *_, slot in slices] == [*range(16), *range(16, 32)]
    assert {end - first for row, first, end, _ in slices if row == 0} == {2048}


@pytest.fixture(scope="module")
def emulator():
    return Emulator(PLANNED, workers=1)


@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize(
    ("rows", "shares", "lists"), [(1, 6, 1), (70, 32, 2), (300, 66, 2)]
)
def test_both_bodies_plan_alike(rows, shares, lists, in_order, rng, emulator):
    for most, window in zip((2048, 1500), WINDOWS, strict=True):
        lengths = rng.integers(1, most, rows)
        cuts = cuts_of(lengths, in_order)
        arrays, dims = given_for(lengths, window, shares, lists, cuts)
        table = arrays["table"]
        dims["pages"] = table.size
        table[...] = rng.permutation(table.size).reshape(table.shape)
        table[1:3, 1:] = table[3:5, :-1]  # pages of two requests
        table[rows // 2, -1] = table.size - 1 + rows % 2  # out of range
        expected, outputs = both(emulator, arrays, dims)
        for name in NAMES:
            np.testing.assert_array_equal(outputs[name], expected[name], name)


def step_of(runs):
    """Requests and positions of rows: of each run the request, the first position and
    the number of rows."""
    return np.concatenate(
        [[[request] * n, range(first, first + n)] for request, first, n in runs], axis=1
    ).astype(np.int32)


RUNS = [(0, 700, 1), (1, 3, 15), (2, 9, 47), (2, 400, 16), (3, 416, 63)]
NO_ROWS = (0, -1, 1)
"""A row without a request."""
ALL_BLOCKS = [
    *((79, 20), (99, 20), (119, 20), (139, 3)),
    *((63, 16), (16, 20), (36, 20), (56, 7)),
]


@pytest.mark.parametrize(
    ("runs", "most", "blocks", "num_rows"),
    [
        (RUNS, 8, ALL_BLOCKS, 16),
        (RUNS, 7, ALL_BLOCKS[:5], 63),
        (RUNS, 3, [], 142),
        ([*RUNS, (4, 5, 15)], 9, [], 157),
        ([*RUNS[1:], (4, 600, 16), NO_ROWS, NO_ROWS], 2, [(157, 2), (141, 16)], 141),
        ([(0, 0, 16), NO_ROWS, (1, 0, 16)], 4, [(17, 16)], 17),
        ([(0, 0, 40)], 2, [(0, 20), (20, 20)], 0),
    ],
)
@pytest.mark.parametrize("in_order", [False, True])
def test_the_last_rows_are_blocks_of_runs(
    runs, most, blocks, num_rows, in_order, emulator
):
    request, position = step_of(runs)
    cuts = cuts_of(position + 1, in_order)
    arrays, dims = given_for(position + 1, 200, 6, 2, cuts)
    arrays["request"] = request
    dims["entries"] = 1 + most
    expected, outputs = both(emulator, arrays, dims)
    for name in NAMES:
        np.testing.assert_array_equal(outputs[name], expected[name], name)
    entries = np.array([(len(blocks), 0), *blocks])
    np.testing.assert_array_equal(expected["blocks"][: len(entries)], entries)
    assert not expected["blocks"][len(entries) :].any()
    assert {*expected["bounds"][-1:, 0]} == {num_rows}
    assert expected["bounds"][:, 0].max() == num_rows


def test_the_cuda_body_compiles_without_spills():
    check_compiled(PLANNED)
