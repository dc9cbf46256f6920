"""The choice of tiles of one worker, by the model of their times."""

from __future__ import annotations

from dataclasses import astuple, fields, replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from etc_dist.functions.tile_shape import TileShape, shapes_for
from etc_dist.functions.weight_layouts import CHUNK_COLUMNS
from etc_dist.ops.matmul import matmul_graph
from etc_dist.ops.tile_model import (
    FAMILY,
    TileWork,
    Tiling,
    choose,
    dims_of,
    largest_tilings,
    predictions,
    text_of,
    tilings,
    work_of,
)
from etc_dist.ops.tuning import KeptTiles, TileConstants, default_tuning
from etc_dist.runtime.memory_plan import Capacity, plan_memory
from etc_dist.schedule import schedule_static

WORKERS = 132
PLANS = {
    layout: schedule_static(matmul_graph(1, w_layout=layout)) for layout in ("nk", "kn")
}
TUNING = replace(default_tuning(), kept=())
EIGHTS = st.integers(1, 2600).map(lambda n: 8 * n)
SIZES = st.tuples(st.integers(1, 9000), EIGHTS, EIGHTS)
SOME = [(m, n, k) for m in (1, 30, 300, 3000) for n, k in ((1536, 9024), (7168, 2048))]
IN_PARTS = 600, 4608, 16384
"""Sizes whose tiles are divided along k."""


def first(sizes, tuning=TUNING, **kinds):
    """The text of the chosen tiles, and the reasons."""
    layout = kinds.get("w_layout", "nk")
    shapes = shapes_for(layout, FAMILY)
    workers = kinds.pop("workers", WORKERS)
    choices = choose(sizes, workers, shapes, tuning, **kinds)
    shape, column_groups, split, parts = (choice.value for choice in choices)
    tiling = Tiling(shape, 8 * column_groups, split, parts)
    return text_of(shapes, tiling), choices[0].reasons()


@given(SIZES, st.integers(1, 140))
def test_parts_are_not_empty_and_fit_in_the_last_wave(sizes, workers):
    m, n, k = sizes
    for tiling in tilings(FAMILY, sizes, workers):
        shape = FAMILY[tiling.shape_idx]
        down, across = -(-m // shape.rows), -(-n // tiling.columns)
        num_stages = -(-k // shape.depth)
        part = -(-num_stages // tiling.parts)
        assert (tiling.parts - 1) * part < num_stages
        assert (tiling.parts == 1) == (tiling.split_tile_columns == 0)
        assert tiling.split_tile_columns <= across
        whole = down * (across - tiling.split_tile_columns)
        if tiling.parts > 1:  # the columns hold at most one more tile for each row
            most = -(-whole // workers) * workers + workers + down
            assert whole + down * tiling.split_tile_columns * tiling.parts < most


@given(SIZES, st.integers(1, 150), st.sampled_from(["nk", "kn"]))
@example((37486, 136, 10840), 144, "nk")
def test_the_memory_of_most_parts_holds_those_of_all_tilings(sizes, workers, w_layout):
    shapes, plan = shapes_for(w_layout, FAMILY), PLANS[w_layout]
    most = {"m": 1, "n": 8, "k": 8, **dims_of(largest_tilings(shapes, workers, 1)[1])}
    capacity = Capacity().grown(plan_memory(plan, most))
    assert capacity.local <= 2**18 * max(1, workers - 1)
    for tiling in tilings(shapes, sizes, workers, w_layout=w_layout):
        dims = dict(zip("mnk", sizes, strict=True)) | dims_of(tiling)
        assert capacity.holds(plan_memory(plan, dims))


@given(SIZES, st.booleans(), st.sampled_from(["nk", "kn"]))
def test_a_choice_is_there_for_all_sizes(sizes, gated, w_layout):
    """With columns that the layout and gate and up allow."""
    shapes = shapes_for(w_layout, FAMILY)
    candidates = list(tilings(shapes, sizes, WORKERS, gated=gated, w_layout=w_layout))
    assert candidates
    for tiling in candidates:
        shape = shapes[tiling.shape_idx]
        assert shape.may_be_gated or not gated
        assert tiling.columns % (16 if gated else 8) == 0
        assert tiling.columns % CHUNK_COLUMNS == 0 or w_layout == "nk"
        assert tiling.columns == shape.columns or (shape.swapped and shape.rows <= 64)


@given(SIZES)
def test_in_order_no_sum_over_k_is_divided(sizes):
    candidates = list(tilings(FAMILY, sizes, WORKERS, in_order=True))
    assert candidates
    assert all(
        FAMILY[tiling.shape_idx].k_parts == tiling.parts == 1 for tiling in candidates
    )


@pytest.mark.parametrize(
    "name", [by_tiling.name for by_tiling in fields(TileConstants)]
)
def test_the_choice_follows_each_constant(name):
    constants, variants = TUNING.tiles, []
    for factor in (1 / 30, 30):
        value = factor * getattr(constants, name)
        variants.append(replace(constants, **{name: value}))
    is_rate = "per_us" in name or name == "shared_ratio"
    differences = set()
    for sizes in (*SOME, IN_PARTS):
        all_predictions = [
            predictions(FAMILY, sizes, WORKERS, prediction)
            for prediction in (constants, *variants)
        ]
        usual, less, more = (
            {prediction.tiling: prediction.us for prediction in by_tiling}
            for by_tiling in all_predictions
        )
        for tiling, us in usual.items():
            low, high = less[tiling], more[tiling]
            low, high = (high, low) if is_rate else (low, high)
            assert low <= us <= high
        differences.update(
            sizes
            for by_tiling in all_predictions[1:]
            if by_tiling[0].tiling != all_predictions[0][0].tiling
        )
    assert bool(differences) == (name != "call_us")  # which all tilings have


def test_times_of_many_tilings_at_once_are_those_of_each():
    for sizes in SOME:
        forecasts = predictions(FAMILY, sizes, WORKERS, TUNING.tiles)
        works = TileWork(
            *np.array([astuple(forecast.work) for forecast in forecasts]).T
        )
        us = [forecast.us for forecast in forecasts]
        np.testing.assert_allclose(works.us(TUNING.tiles), us, rtol=1e-12)


def test_one_more_tile_than_workers_takes_another_wave():
    shape = TileShape(128, 256)
    times = [
        work_of(shape, Tiling(0, 256), (128 * tiles, 256, 4096), WORKERS)
        for tiles in (WORKERS, WORKERS + 1, 2 * WORKERS)
    ]
    single, double, full = (work.us(TUNING.tiles) for work in times)
    # Two full waves have less power than one that is followed by a tile.
    assert 1.6 * single < double < full < 1.15 * double


def test_the_work_of_a_tiling_in_parts():
    """Of a wave and 12 tiles, the last 12 columns in 11 parts of six stages each."""
    shape, sizes = TileShape(128, 256), (128, 144 * 256, 4096)
    whole = work_of(shape, Tiling(0, 256), sizes, WORKERS)
    parts = work_of(shape, Tiling(0, 256, 12, 11), sizes, WORKERS)
    assert (whole.num_blocks, whole.num_epilogues, whole.scratch_bytes) == (128, 2, 0)
    assert (parts.num_blocks, parts.num_epilogues) == (64 + 6, 2)
    assert parts.scratch_bytes == 12 * 11 * 128 * 256 * 4
    assert parts.us(TUNING.tiles) < whole.us(TUNING.tiles)


def test_the_reasons_name_bound_scratch_and_the_next_tiles():
    text, reasons = first(IN_PARTS)
    assert " split-K in " in text and text in reasons[0]
    assert "us predicted for 600 x 4608 x 16384, bound by " in reasons[0]
    assert " tiles on 132 workers" in reasons[1] and "MiB of sums" in reasons[1]
    assert sum("  next: " in line for line in reasons) == 3
    assert reasons[-1] == f"  tuning: {TUNING.show()}"


WHOLE = "128 x 128, swapped"
DIVIDED = f"{WHOLE}, split-K in 2 parts for 10 tile columns"


@pytest.mark.parametrize(
    ("tiles", "sizes", "kinds", "counts"),
    [
        (WHOLE, IN_PARTS, {}, True),
        (WHOLE, (601, *IN_PARTS[1:]), {}, False),
        (WHOLE, IN_PARTS, {"workers": 78}, False),
        (WHOLE, IN_PARTS, {"w_layout": "kn"}, False),
        (WHOLE, IN_PARTS, {"in_order": True}, True),
        (DIVIDED, IN_PARTS, {"in_order": True}, False),
        (DIVIDED, IN_PARTS, {}, True),
    ],
)
def test_tiles_are_kept_for_exactly_the_sizes_of_the_measurement(
    tiles, sizes, kinds, counts
):
    tuning = replace(TUNING, kept=(KeptTiles(*IN_PARTS, tiles),))
    model, (text, reasons) = first(sizes, **kinds), first(sizes, tuning, **kinds)
    assert model[0] != tiles and text == (tiles if counts else model[0])
    assert any("etc-dist tune --sizes" in line for line in reasons) == counts
