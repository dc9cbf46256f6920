"""The choice of tiles of pairs of workers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from etc_dist.functions.tile_matmul import TileShape
from etc_dist.ops.matmul_policy import SHAPES, choose, estimate, rate
from etc_dist.ops.tuning import Constants, Measured, Tuning, default_tuning

WORKERS = 132
MODEL = Tuning(
    "a GPU",
    WORKERS,
    default_tuning().tiles,
    Constants(8.6, 0.01, 78000, 5350000, 0.15, 1700, 1.7, 4.0),
)
"""Without measured times."""


@pytest.mark.parametrize(
    ("m", "n", "k", "shape"),
    [
        (1, 4096, 4096, TileShape(8, 64, swapped=True)),
        (8, 10240, 5120, TileShape(8, 160, swapped=True)),
        (32, 12288, 6144, TileShape(32, 112, swapped=True)),
        (64, 4096, 4096, TileShape(128, 64, "k")),
        (64, 5120, 25600, TileShape(64, 80, "rows", swapped=True)),
        (64, 4096, 1792, TileShape(128, 64, "k")),
        (64, 7168, 8192, TileShape(64, 128, "rows", swapped=True)),
        (64, 10240, 5120, TileShape(128, 160)),
        (128, 5120, 25600, TileShape(128, 80, "k")),
        (128, 10240, 5120, TileShape(128, 160)),
        (128, 5120, 3200, TileShape(128, 80, "k")),
        (128, 13312, 16384, TileShape(128, 208, "k")),
        (256, 5120, 3200, TileShape(256, 80, "rows")),
        (256, 7168, 8192, TileShape(256, 112, "rows")),
        (512, 6400, 5120, TileShape(256, 208, "rows")),
        (1024, 3584, 4096, TileShape(256, 224, "rows")),
        (8192, 4096, 4096, TileShape(256, 256, "rows")),
    ],
)
def test_the_tiles_measured_best_are_chosen(m, n, k, shape):
    assert SHAPES[choose(m, n, k, WORKERS)] == shape


def test_few_rows_are_one_tile_down():
    assert all(SHAPES[choose(m, 5120, 25600, WORKERS)].rows >= m for m in range(1, 65))


def test_the_choice_follows_the_constants():
    sizes = 64, 5120, 25600, WORKERS
    for name, factor in {"exchange_us": 100, "cycles_per_us": 1 / 4}.items():
        value = factor * getattr(MODEL.constants, name)
        changed = replace(MODEL, constants=replace(MODEL.constants, **{name: value}))
        assert choose(*sizes, tuning=changed) != choose(*sizes, tuning=MODEL)


MEASURED = (
    Measured(
        *(64, 5120, 25600),
        {"64 x 80, split k, swapped": 21.0, "64 x 128, split columns, swapped": 20.0},
    ),
    Measured(
        *(512, 4096, 4096),
        {"128 x 256, split columns": 30.0, "256 x 128, split rows": 20.0},
    ),
)


@pytest.mark.parametrize(
    ("sizes", "options", "counts"),
    [
        ((64, 5120, 25600), {}, True),
        ((33, 5120, 25600), {}, True),
        ((64, 5240, 28000), {}, True),
        ((32, 5120, 25600), {}, False),  # another class of rows
        ((65, 5120, 25600), {}, False),
        ((64, 5120, 28808), {}, False),
        ((64, 5120, 25600), {"in_order": True}, False),  # the model's tiles split k
        ((450, 4096, 4096), {}, True),
        ((512, 4224, 4096), {}, False),  # one of the tiles takes two waves
        ((64, 5120, 25600), {"workers": 78}, False),
    ],
)
def test_measured_tiles_are_preferred_within_their_class(sizes, options, counts):
    tuning = replace(MODEL, measured=MEASURED)
    workers = options.pop("workers", WORKERS)
    model = rate(*sizes, workers, **options, tuning=MODEL)
    found = rate(*sizes, workers, **options, tuning=tuning)
    if not counts:
        assert found == model
        return
    us = {str(SHAPES[one.number]): one.us for one in found[:2]}
    assert us in [one.us for one in MEASURED] and found[0].us == 20.0
    assert sorted(one.number for one in found) == sorted(one.number for one in model)


def test_factors_are_those_of_the_nearest_number_of_rows_that_was_measured():
    few = 5120, 3200
    first, second = rate(12, *few, WORKERS, tuning=MODEL)[:2]
    factors = {str(SHAPES[first.number]): {"8": 1.0, "16": 2.0, "64": 3.0}}
    tuning = replace(MODEL, factors=factors)
    assert choose(12, *few, WORKERS, tuning=tuning) == second.number
    for m, factor in {1: 1, 8: 1, 9: 2, 17: 3, 64: 3, 100: 3}.items():
        times = [
            estimate(SHAPES[first.number], m, *few, WORKERS, one)
            for one in (tuning, MODEL)
        ]
        assert times[0] == factor * times[1]


def test_one_more_tile_than_workers_takes_another_wave():
    shape = TileShape(128, 128)
    times = [estimate(shape, 128, n, 4096, WORKERS) for n in (66 * 128, 67 * 128)]
    assert times[1] > 1.5 * times[0]


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (5120, 25600)])
def test_k_may_be_added_in_one_order_for_each_number_of_rows(n, k, gated):
    rows = [*range(1, 400), *range(400, 8193, 37), 8192]
    parts = {
        in_order: {
            SHAPES[choose(m, n, k, WORKERS, gated=gated, in_order=in_order)].k_parts
            for m in rows
        }
        for in_order in (False, True)
    }
    assert parts[True] == {1} < parts[False]
