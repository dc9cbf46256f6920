"""The choice of the MLP's tiles as a pair."""

from __future__ import annotations

from dataclasses import replace

import pytest

from etc_dist.layers.mlp_policy import choose_shapes, pair_key, rate_pairs
from etc_dist.ops.matmul_policy import SHAPES
from etc_dist.ops.tuning import MeasuredPair, default_tuning, shipped

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
