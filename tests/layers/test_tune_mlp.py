"""Measured pairs of tiles of the MLP, with times of a model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from etc_dist.layers import tune_mlp as module
from etc_dist.layers.mlp_policy import pair_key, rate_pairs
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


def test_a_pair_that_is_faster_than_the_models_is_kept():
    sizes = 128, 5120, 3200
    best = rate_pairs(*sizes, WORKERS, SHAPES, tuning=MODEL)[7]
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


def test_only_mlps_whose_two_matmuls_are_tuned_are_measured():
    sizes = [(6400, 5120), (5120, 3200), (4096, 4096), (4096, 1793), (3586, 4096)]
    assert mlp_sizes(sizes) == [(5120, 3200), (4096, 1793)]


@pytest.mark.mpi(ranks=[1, 2])
def test_pairs_are_measured_on_one_rank(world, monkeypatch):
    class Timer(module.MlpTimer):
        def __init__(self, world, program, elements):
            self._world = world

        def _time(self, sample):
            return 10.0 + ((sample.up, sample.down) != fast)

    best = rate_pairs(64, 5120, 3200, WORKERS, SHAPES, tuning=MODEL)[5]
    fast = best.up.number, best.down.number
    monkeypatch.setattr(module, "MlpTimer", Timer)
    monkeypatch.setattr(module, "ROW_CLASSES", (64,))
    said = []
    made = tune_mlp(world, MODEL, [(6400, 5120), (5120, 3200)], said.append)
    if world.size > 1:
        assert made.pairs == ()
        assert said == ["pairs of tiles of the MLP are measured on one rank only"]
    else:
        (one,) = made.pairs
        assert (one.m, one.hidden, one.inner) == (64, 5120, 3200)
        assert min(one.us.values()) == 10
        assert said[-1] == "other pairs than the model's at 1 of 1"


def test_without_an_mlp_in_the_sizes_a_tuning_keeps_its_pairs(world):
    assert tune_mlp(world, default_tuning(), [(5120, 3200)], str) == default_tuning()
