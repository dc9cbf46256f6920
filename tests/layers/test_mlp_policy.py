"""The choice of the tiles of the MLP's two matmuls."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import cast

import pytest

from etc_dist.functions.tile_shape import TileShape
from etc_dist.layers.mlp_policy import (
    SWITCH_US,
    WAIT_US,
    choose_tiles,
    fastest_pair,
)
from etc_dist.layers.mlp_tiles import mlp_tiles_graph
from etc_dist.ops.tile_model import (
    FAMILY,
    Prediction,
    TileWork,
    Tiling,
    dims_of,
    predictions,
)
from etc_dist.ops.tuning import default_tuning

WORKERS = 132
TUNING = replace(default_tuning(), kept=())
SIZES = [
    (m, hidden, inner)
    for m in (1, 33, 200, 384, 777, 1024, 4096)
    for hidden, inner in ((5120, 25600), (8192, 3584))
]


def chosen(m, hidden, inner, ranks=1, **options):
    """The dims, and the reasons of both matmuls."""
    dims = {"rows": m // ranks, "hidden": hidden, "inner": inner}
    choices = choose_tiles(dims, ranks, WORKERS, FAMILY, tuning=TUNING, **options)
    reasons = [choice.reasons() for choice in choices if choice.dim.endswith("shape")]
    return {choice.dim: choice.value for choice in choices}, reasons


def tilings(dims):
    return [
        Tiling(
            dims[f"{name}shape"],
            8 * dims[f"{name}column_groups"],
            dims[f"{name}split_tile_columns"],
            dims[f"{name}parts"],
        )
        for name in ("gate_up_", "down_")
    ]


@pytest.mark.parametrize("sizes", SIZES)
def test_the_sum_of_both_times_is_least(sizes):
    m, hidden, inner = sizes
    ups = predictions(FAMILY, (m, inner, hidden), WORKERS, TUNING.tiles, gated=True)
    downs = predictions(FAMILY, (m, hidden, inner), WORKERS, TUNING.tiles)
    likely = []
    for up, down in product(ups[:60], downs[:60]):
        is_exposed = up.tiles_down != down.tiles_down or up.tiles_down == 1
        # Sums of parts come last; in one wave there are no other tiles.
        is_exposed |= up.tiling.parts > 1 or up.work.num_tiles <= WORKERS
        is_switched = up.tiling.shape_idx != down.tiling.shape_idx
        us = up.us + down.us + WAIT_US * is_exposed + SWITCH_US * is_switched
        likely.append((us, [up.tiling, down.tiling]))
    least, _ = min(likely, key=lambda pair_of_us: pair_of_us[0])
    dims, (reasons, later_reasons) = chosen(*sizes)
    assert [us for us, pair in likely if pair == tilings(dims)] == [least]
    together = f": {least - TUNING.tiles.call_us:.1f} us together; down waits for "
    assert together in reasons[1] and together in later_reasons[1]


def made(shape_idx, us, tiles_down, parts=1, num_tiles=2 * WORKERS):
    tiling = Tiling(shape_idx, 128, int(parts > 1), parts)
    work = cast(TileWork, SimpleNamespace(num_tiles=num_tiles))
    return Prediction(tiling, work, us, tiles_down)


@pytest.mark.parametrize(
    ("rivals", "shape_idx", "us", "blocks"),
    [
        ([], 6, WAIT_US + SWITCH_US, 1),
        ([made(5, 8 + 0.9 * SWITCH_US, 3)], 5, WAIT_US + 0.9 * SWITCH_US, 1),
        ([made(7, 8 + 0.9 * WAIT_US, 2)], 7, 0.9 * WAIT_US + SWITCH_US, 2),
        ([made(7, 8 + 1.1 * WAIT_US, 2)], 6, WAIT_US + SWITCH_US, 1),
    ],
)
def test_blocks_of_rows_save_a_wait_and_equal_tiles_a_switch(
    rivals, shape_idx, us, blocks
):
    """others: slower tilings of the second matmul, of the first one's shape or with as
    many rows of tiles."""
    pair = fastest_pair([[made(5, 10.0, 2)], [made(6, 8.0, 3), *rivals]], 1.0, WORKERS)
    assert pair.second.tiling.shape_idx == shape_idx
    assert (pair.us, pair.blocks) == (pytest.approx(17 + us), blocks)


@pytest.mark.parametrize(("faster_us", "parts"), [(0.9, 1), (1.1, 2)])
def test_split_k_before_down_exposes_its_wait(faster_us, parts):
    whole, divided = made(5, 10, 2), made(5, 10 - faster_us * WAIT_US, 2, 2)
    pair = fastest_pair([[divided, whole], [made(5, 8.0, 2)]], 1.0, WORKERS)
    assert (pair.first.tiling.parts, pair.blocks) == (parts, 2)


def test_blocks_in_one_wave_expose_the_wait():
    few, many = made(5, 10, 1), made(6, 10.1, 2, num_tiles=WORKERS)
    downs = [made(5, 8, 1), made(6, 8, 2)]
    pair = fastest_pair([[few, many], downs], 1.0, WORKERS)
    assert pair.first.tiling.shape_idx == 5


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("sizes", SIZES)
def test_the_policy_counts_the_tiles_and_blocks_of_the_graph(ranks, sizes):
    m, hidden, inner = sizes
    m += m % ranks
    dims, reasons = chosen(m, hidden, inner, ranks)
    extents = {"rows": m // ranks, "hidden": hidden, "inner": inner}
    env = mlp_tiles_graph(ranks).environment(extents | dims, 0)
    blocks = env["activated_blocks"]
    text = f"down waits for {blocks} blocks of rows" if blocks > 1 else "for all rows"
    for name, lines in zip(("gate_up_", "down_"), reasons, strict=True):
        assert lines[1].endswith(text)
        across = env[f"{name}whole_tile_columns"] + env[f"{name}split_tile_columns"]
        tiles = env[f"{name}tiles_down"] * across
        assert lines[2].startswith(f"  {tiles} tiles on {WORKERS} workers")


def test_blocks_are_the_rows_of_both_matmuls_tiles_or_all_rows():
    """300 rows in three tiles of either shape, or in two of another."""
    shapes = [TileShape(128, 160), TileShape(112, 128, swapped=True)]
    shapes += [TileShape(160, 128, swapped=True)]
    graph = mlp_tiles_graph(1, shapes=shapes)
    for down, blocks in ((0, 3), (1, 3), (2, 1)):
        dims = {"rows": 300, "hidden": 512, "inner": 512}
        dims |= dims_of(Tiling(0, 160), "gate_up_") | dims_of(
            Tiling(down, 128), "down_"
        )
        env = graph.environment(dims, 0)
        assert env["activated_blocks"] == blocks
        assert env["activated_rows"] == (300 if blocks == 1 else 104)


@pytest.mark.parametrize("sizes", SIZES)
def test_in_order_no_sum_over_k_is_divided(sizes):
    dims, _ = chosen(*sizes, in_order=True)
    assert all(
        FAMILY[tiling.shape_idx].k_parts == tiling.parts == 1
        for tiling in tilings(dims)
    )
