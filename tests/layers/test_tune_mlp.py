"""Measured pairs of tiles of the MLP, with times of a model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from etc_dist.layers import tune_mlp as module
from etc_dist.layers.mlp_policy import choose_shapes, pair_key, rate_pairs
from etc_dist.layers.tune_mlp import PairSample, mlp_sizes, tune_mlp, tune_pairs
from etc_dist.ops.matmul_policy import SHAPES
from etc_dist.ops.tuning import default_tuning, parse

WORKERS = 132
MODEL = replace(default_tuning(), measured=(), pairs=())
"""Without measured times."""


def model_us(sample):
    m, hidden, inner, *numbers = sample
    rated = rate_pairs(m, hidden, inner, WORKERS, SHAPES, tuning=MODEL)
    return {(one.up.number, one.down.number): one.us for one in rated}[tuple(numbers)]


def chosen(tuning, m, hidden, inner, ranks=1):
    dims = {"rows": m // ranks, "hidden": hidden, "inner": inner}
    found = choose_shapes(dims, ranks, WORKERS, SHAPES, tuning=tuning)
    assert [one.dim for one in found] == ["gate_up_shape", "down_shape"]
    return [one.value for one in found], found[0].reasons()


def test_a_pair_that_is_faster_than_the_models_is_kept_and_chosen():
    sizes = 128, 5120, 3200
    first, *others = rate_pairs(*sizes, WORKERS, SHAPES, tuning=MODEL)
    best = others[7]
    fast = PairSample(*sizes, best.up.number, best.down.number)
    said = []

    def measure(samples):
        return [model_us(one) / (1 + (one == fast)) for one in samples]

    made = tune_pairs(measure, MODEL, [sizes[1:]], said.append)
    assert [(one.m, one.hidden, one.inner) for one in made.pairs] == [sizes]
    key = pair_key(SHAPES[best.up.number], SHAPES[best.down.number])
    assert next(iter(made.pairs[0].us)) == key
    assert any(text.startswith(f"128 x 5120 x 3200: {key}, ") for text in said)
    assert parse(made.document(), "here", "") == made

    us = made.pairs[0].us[key]
    for near in (sizes, (100, 5120, 3200), (128, 5152, 3168)):
        numbers, reasons = chosen(made, *near)
        assert numbers == [best.up.number, best.down.number]
        text = f"  with down on {SHAPES[best.down.number]}: {us:.1f} us together, "
        assert reasons[1] == text + "measured at 128 x 5120 x 3200"
    for far in ((96, 5120, 3200), (200, 5120, 3200), (128, 6400, 3200)):
        numbers, reasons = chosen(made, *far)
        assert numbers == chosen(MODEL, *far)[0]
        assert reasons[1].endswith(" us together, predicted")
    assert chosen(made, *sizes, ranks=4)[0] == [best.up.number, best.down.number]
    assert chosen(MODEL, *sizes)[0] == [first.up.number, first.down.number]


def test_two_shapes_in_a_row_cost_the_fetch_of_code():
    rated = rate_pairs(8, 8192, 3584, WORKERS, SHAPES, tuning=MODEL)
    for one in rated:
        extra = one.us - one.up.us - one.down.us
        assert (extra == pytest.approx(0)) == (one.up.number == one.down.number)


def test_only_mlps_whose_two_matmuls_are_tuned_are_measured():
    sizes = [(6400, 5120), (5120, 3200), (4096, 4096), (4096, 1793), (3586, 4096)]
    assert mlp_sizes(sizes) == [(5120, 3200), (4096, 1793)]


@pytest.mark.mpi
def test_all_ranks_get_the_pairs_of_the_slowest(world, monkeypatch):
    class Slower(module.PairTimer):
        def __init__(self, world, program, elements):
            self._world = world

        def _time(self, sample):
            fast = sample.up == sample.down and self._world.rank == 0
            return 10.0 if fast else 20.0 + self._world.rank + sample.down / 100

    monkeypatch.setattr(module, "PairTimer", Slower)
    monkeypatch.setattr(module, "ROW_CLASSES", (64,))
    sizes = [(6400, 5120), (5120, 3200)]
    made = tune_mlp(world, MODEL, sizes, say=str)
    every = world.gather(made.document())
    assert len({str(one) for one in every}) == 1
    assert tune_mlp(world, made, [], say=str).pairs == ()
