"""Measuring a tuning, with times of a model whose constants are known."""

from __future__ import annotations

import sys
from dataclasses import astuple, replace
from importlib import import_module
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etc_dist import compile
from etc_dist.errors import WorldError
from etc_dist.ops import tune as module
from etc_dist.ops.matmul import matmul_graph
from etc_dist.ops.matmul_policy import SHAPES, choose, estimate
from etc_dist.ops.tune import MatmulTimer, Sample, tune, tune_world
from etc_dist.ops.tuning import Constants, Tuning

WORKERS = 132
CHOSEN = [*product((1, 33, 100, 400, 3000), (1536, 7168), (1024, 25600))]
"""M, N and K at which tiles are chosen by a fitted model."""


MODEL = Tuning(
    "NVIDIA H200", WORKERS, Constants(8.6, 0.01, 78000, 5350000, 0.15, 1700, 1.7, 0.5)
)
"""Without measured times."""


@pytest.fixture(autouse=True, scope="module")
def coarse():
    """Fits use fewer sizes than on a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "FITTED_SIZES", ((4096, 4096), (16384, 6656)))
        patch.setattr(module, "FITTED_ROWS", (1, 32, 128, 512, 4096))
        yield


def tuning_like(factors):
    constants = zip(astuple(MODEL.constants), factors, strict=True)
    return replace(MODEL, constants=Constants(*(a * b for a, b in constants)))


def timer(tuning, faster=None):
    """Times by the model; the tiles of the sample `faster` take half of it."""

    def measure(samples):
        times = [
            estimate(SHAPES[s.number], s.m, s.n, s.k, WORKERS, tuning) for s in samples
        ]
        return [us / (1 + (s == faster)) for us, s in zip(times, samples, strict=True)]

    return measure


@given(st.lists(st.floats(0.7, 1.4), min_size=8, max_size=8))
def test_constants_that_give_the_times_are_found(factors):
    true = tuning_like(factors)
    made = tune(timer(true), MODEL, [], say=str)
    for m, n, k in CHOSEN:
        right, found = (
            SHAPES[choose(m, n, k, WORKERS, tuning=t)] for t in (true, made)
        )
        times = [estimate(one, m, n, k, WORKERS, true) for one in (right, found)]
        assert found == right or times[1] < times[0] * 1.001


def test_noise_of_a_percent_costs_no_more_than_a_percent(rng):
    true = tuning_like([1.1, 1, 0.8, 0.7, 1, 0.9, 1.3, 2])

    def measure(samples):
        return [us * (1 + rng.normal() / 100) for us in timer(true)(samples)]

    made = tune(measure, MODEL, [], say=str)
    for m, n, k in CHOSEN:
        tiles = [SHAPES[choose(m, n, k, WORKERS, tuning=t)] for t in (true, made)]
        times = [estimate(one, m, n, k, WORKERS, true) for one in tiles]
        assert times[1] < times[0] * 1.02


def test_tiles_that_are_faster_than_by_the_model_are_kept():
    sizes = 512, 7168, 2048
    second = module._samples(MODEL, *sizes)[1]
    said = []
    made = tune(timer(MODEL, second), MODEL, [sizes[1:]], said.append)
    assert [(one.m, one.n, one.k) for one in made.measured] == [sizes]
    assert choose(*sizes, WORKERS, tuning=made) == second.number
    assert choose(*sizes, WORKERS, tuning=MODEL) != second.number
    assert any(f"512 x 7168 x 2048: {SHAPES[second.number]}, " in text for text in said)


@pytest.fixture
def measuring(world, monkeypatch):
    """`tune_world` with simulated times, of which each rank's are longer."""

    class Slower(MatmulTimer):
        def __init__(self, world, program, elements):
            self._world, self._program = world, program

        def _time(self, sample):
            tuning = tuning_like([1] * 8)
            us = estimate(
                SHAPES[sample.number], *sample[:3], self._program.workers, tuning
            )
            return us + self._world.rank

    monkeypatch.setattr(module, "MatmulTimer", Slower)
    monkeypatch.setattr(module, "_check_world", lambda world: None)
    monkeypatch.setattr(module, "device_of", lambda world: "NVIDIA GB99")


@pytest.mark.mpi(ranks=[2])
def test_the_slowest_rank_counts_and_all_have_its_tuning(world, measuring):
    made = tune_world(world, [], say=str)
    assert made.device == "NVIDIA GB99"
    launch = MODEL.constants.launch_us + world.size - 1
    assert made.constants.launch_us == pytest.approx(launch, rel=0.02)
    assert len({str(one) for one in world.gather(made.document())}) == 1


@pytest.mark.mpi(ranks=[2])
def test_gpus_of_two_kinds_are_refused(world, measuring, monkeypatch):
    monkeypatch.setattr(module, "device_of", lambda world: f"GPU {world.rank % 2}")
    with pytest.raises(WorldError, match="GPUs of one kind"):
        tune_world(world, [], say=str)


class Event:
    def record(self):
        pass

    synchronize = record


@pytest.mark.mpi
def test_calls_are_timed_on_arrays_of_each_size(world, monkeypatch):
    """With a clock that counts, and NumPy in place of CuPy where there is no GPU."""
    times = iter(range(1, 1000))
    if world.backend == "cpu":
        cuda = SimpleNamespace(Event=Event, get_elapsed_time=None)
        stand_in = SimpleNamespace(asarray=np.asarray, empty=np.empty, cuda=cuda)
        monkeypatch.setitem(sys.modules, "cupy", stand_in)
    clock = import_module("cupy").cuda
    monkeypatch.setattr(clock, "get_elapsed_time", lambda *_: next(times) / 1e3)
    monkeypatch.setattr(module, "BEYOND_CACHE", 1 << 20)
    with compile(matmul_graph(world.size), world) as program:
        measure = MatmulTimer(world, program, 300 * 520)
        found = measure([Sample(70, 520, 136, 2), Sample(300, 264, 136, 25)])
    assert found == [8, 21]  # medians of 3 ... 13 and 16 ... 26
