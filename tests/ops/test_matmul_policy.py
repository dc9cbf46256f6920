"""The choice of tiles."""

from __future__ import annotations

import pytest

from etc_dist.functions.tile_matmul import TileShape
from etc_dist.ops.matmul_policy import SHAPES, choose, estimate

WORKERS = 132


@pytest.mark.parametrize(
    ("m", "n", "k", "shape"),
    [
        (1, 4096, 4096, TileShape(8, 64, swapped=True)),
        (8, 10240, 5120, TileShape(8, 160, swapped=True)),
        (32, 12288, 6144, TileShape(32, 192, swapped=True)),
        (64, 4096, 4096, TileShape(64, 64, "k", swapped=True)),
        (64, 5120, 25600, TileShape(64, 80, "k", swapped=True)),
        (64, 7168, 8192, TileShape(64, 128, swapped=True)),
        (64, 10240, 5120, TileShape(64, 256, swapped=True)),
        (128, 5120, 25600, TileShape(128, 112)),
        (128, 10240, 5120, TileShape(128, 160)),
        (8192, 4096, 4096, TileShape(256, 256, "rows")),
    ],
)
def test_the_tiles_measured_best_are_chosen(m, n, k, shape):
    assert SHAPES[choose(m, n, k, WORKERS)] == shape


def test_few_rows_are_one_tile_down():
    assert all(SHAPES[choose(m, 5120, 25600, WORKERS)].rows >= m for m in range(1, 65))


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
