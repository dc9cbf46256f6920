"""The choice of the MLP's tiles as a pair."""

from __future__ import annotations

from dataclasses import replace

import pytest

from etc_dist.functions.tile_matmul import TileShape
from etc_dist.layers.mlp_policy import MOST_SLOWER, choose_shapes, pair_key, rate_pairs
from etc_dist.layers.mlp_tiles import mlp_tiles_graph
from etc_dist.ops.matmul_policy import SHAPES
from etc_dist.ops.tuning import MeasuredPair, default_tuning, shipped
from tests.ops.tile_counts import tiles_in, tiles_of

WORKERS = 132
MODEL = replace(default_tuning(), measured=(), pairs=())
"""Without measured times."""
SIZES = 128, 5120, 3200


def chosen(tuning, m, hidden, inner, ranks=1, **options):
    dims = {"rows": m // ranks, "hidden": hidden, "inner": inner}
    found = choose_shapes(dims, ranks, WORKERS, SHAPES, tuning=tuning, **options)
    assert [one.dim for one in found] == ["gate_up_shape", "down_shape"]
    return [one.value for one in found], found[0].reasons()


def test_two_shapes_in_a_row_cost_the_fetch_of_code():
    for one in rate_pairs(8, 8192, 3584, WORKERS, SHAPES, tuning=MODEL):
        extra = one.us - one.up.us - one.down.us
        assert (extra == pytest.approx(0)) == (one.up.number == one.down.number)


@pytest.fixture
def measured():
    """A pair that is not the model's choice, and a tuning that has measured it."""
    best = rate_pairs(*SIZES, WORKERS, SHAPES, tuning=MODEL)[7]
    key = pair_key(SHAPES[best.up.number], SHAPES[best.down.number])
    pair = MeasuredPair(*SIZES, {key: 33.3})
    return [best.up.number, best.down.number], replace(MODEL, pairs=(pair,))


@pytest.mark.parametrize("near", [SIZES, (100, 5120, 3200), (128, 5152, 3168)])
def test_a_measured_pair_is_chosen_at_its_sizes_and_near_them(near, measured):
    numbers, tuning = measured
    assert chosen(MODEL, *near)[0] != numbers
    found, reasons = chosen(tuning, *near)
    assert found == numbers
    assert reasons[1] == (
        f"  with down on {SHAPES[numbers[1]]}: 33.3 us together, "
        "measured at 128 x 5120 x 3200"
    )
    assert chosen(tuning, *near, ranks=4)[0] == numbers


@pytest.mark.parametrize(
    "far", [(96, 5120, 3200), (200, 5120, 3200), (128, 6400, 3200)]
)
def test_a_measured_pair_does_not_serve_other_sizes(far, measured):
    found, reasons = chosen(measured[1], *far)
    assert found == chosen(MODEL, *far)[0]
    assert reasons[1].endswith(" us together, predicted")


def test_pairs_that_cannot_serve_are_passed_over(measured):
    numbers, tuning = measured
    unknown = {"9 x 9 + 9 x 9": 1.0, "8 x 128, split columns, swapped + 9 x 9": 1.0}
    (pair,) = tuning.pairs
    few = replace(pair, us={**unknown, **pair.us})
    assert chosen(replace(tuning, pairs=(few,)), *SIZES)[0] == numbers
    # A pair that splits k adds in another order for other numbers of rows.
    both = [SHAPES[number] for number in numbers]
    assert not all(one.serves(gated=False, in_order=True) for one in both)
    found, _ = chosen(tuning, *SIZES, in_order=True)
    assert all(SHAPES[number].serves(gated=False, in_order=True) for number in found)


@pytest.mark.parametrize("name", shipped())
def test_reasons_are_shown_at_all_measured_sizes(name):
    tuning = shipped()[name]
    sizes = {(one.m, one.k, one.n // 2) for one in tuning.measured if one.n % 2 == 0}
    sizes |= {(one.m, one.n, one.k) for one in tuning.measured}
    sizes |= {(one.m, one.hidden, one.inner) for one in tuning.pairs}
    for m, hidden, inner in sizes:
        dims = {"rows": m, "hidden": hidden, "inner": inner}
        workers = tuning.workers
        for choice in choose_shapes(dims, 1, workers, SHAPES, tuning=tuning):
            first, together, *_ = choice.reasons()
            assert f"tiles of {SHAPES[choice.value]}: " in first
            assert " us together, " in together


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("hidden", "inner"), [(5120, 3200), (8192, 3584)])
@pytest.mark.parametrize("rows", range(258, 1340, 54))
def test_the_policy_counts_the_tiles_of_the_graph(ranks, hidden, inner, rows):
    dims = {"rows": rows // ranks, "hidden": hidden, "inner": inner}
    tuning = default_tuning()
    choices = choose_shapes(dims, ranks, WORKERS, SHAPES, tuning=tuning)
    sizes = rows, hidden, inner, WORKERS, SHAPES
    best = rate_pairs(*sizes, world_size=ranks, tuning=tuning)[0]
    assert [one.value for one in choices] == [best.up.number, best.down.number]
    shapes = {one.dim: one.value for one in choices}
    env = mlp_tiles_graph(ranks).environment(dims | shapes, 0)
    for one, name in zip(choices, ("gate_up", "down"), strict=True):
        assert tiles_in(one.reasons()) == tiles_of(env, name)


def test_measured_waves_are_those_of_one_rank():
    """Of 400 rows of two ranks a block has 208: down has one more row of tiles."""
    sizes = 400, 5120, 1024
    tiles = TileShape(128, 128, "k"), TileShape(160, 256, swapped=True)
    pair = MeasuredPair(*sizes, {pair_key(*tiles): 1.0})
    tuning = replace(MODEL, pairs=(pair,))
    one, two = (
        rate_pairs(*sizes, WORKERS, SHAPES, world_size=ranks, tuning=tuning)
        for ranks in (1, 2)
    )
    assert one[0].measured == pair
    assert two[0].measured is None


@pytest.mark.parametrize(
    ("slow_us", "fast_us", "serves"), [(2.0, 3.0, False), (1.1, 3.0, True)]
)
def test_the_fastest_of_measured_pairs_must_be_fast(slow_us, fast_us, serves):
    """Times relative to the model's choice, the second pair. It does not vouch for the
    first one."""
    rated = rate_pairs(*SIZES, WORKERS, SHAPES, tuning=MODEL)
    best = rated[0]
    slow = next(one for one in rated if one.us > MOST_SLOWER * best.us)
    keys = [pair_key(SHAPES[o.up.number], SHAPES[o.down.number]) for o in (slow, best)]
    times = slow_us * best.us, fast_us * best.us
    pair = MeasuredPair(*SIZES, dict(zip(keys, times, strict=True)))
    found = rate_pairs(*SIZES, WORKERS, SHAPES, tuning=replace(MODEL, pairs=(pair,)))
    assert (found[0].measured == pair) == serves
