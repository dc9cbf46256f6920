"""Measuring a tuning, with times of a model whose constants are known."""

from __future__ import annotations

import sys
from dataclasses import astuple, fields, replace
from importlib import import_module
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etc_dist import compile
from etc_dist.errors import WorldError
from etc_dist.ops import tune as module
from etc_dist.ops.fit_constants import Time, fit, lost_by_choice, model_error
from etc_dist.ops.matmul import matmul_graph
from etc_dist.ops.tile_model import (
    FAMILY,
    Tiling,
    choose,
    dims_of,
    predictions,
    text_of,
    work_of,
)
from etc_dist.ops.tune import (
    MatmulTimer,
    Sample,
    confirm,
    drawn_sizes,
    likely,
    tune,
    tune_world,
)
from etc_dist.ops.tuning import TileConstants, default_tuning

WORKERS = 132
MODEL = default_tuning()
OTHER = [1.1, 0.6, 0.8, 1.5, 1, 2, 1.3, 1.2, 1, 4, 1, 4, 3, 0.2]
"""Factors of constants that choose other tiles than MODEL."""
FACTORS = st.lists(st.floats(0.5, 2), min_size=len(OTHER), max_size=len(OTHER))


@pytest.fixture(autouse=True, scope="module")
def coarse():
    """Fits use fewer sizes than on a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "NUM_SIZES", 24)
        yield


def constants_like(factors):
    return TileConstants(*np.multiply(astuple(MODEL.tiles), factors))


def timer(constants, faster=None, workers=WORKERS):
    """Times by the model; the sample `faster` takes half of it."""

    def measure(samples):
        works = [
            work_of(FAMILY[sample.tiling.shape_idx], sample.tiling, sample[:3], workers)
            for sample in samples
        ]
        times = [work.us(constants) for work in works]
        return [us / (1 + (s == faster)) for us, s in zip(times, samples, strict=True)]

    return measure


def drawn_times(constants):
    """Of all tilings at other sizes than those of a fit."""
    return [
        Time(sizes, prediction.work, prediction.us)
        for sizes in ((m, n + 64, k - 64) for m, n, k in drawn_sizes())
        for prediction in predictions(FAMILY, sizes, WORKERS, constants)
    ]


@given(FACTORS)
def test_constants_that_give_the_times_are_found(factors):
    true = constants_like(factors)
    fitted = tune(timer(true), MODEL, say=str).tiles
    times = drawn_times(true)
    assert np.mean(lost_by_choice(times, fitted)) < 0.002
    assert model_error(times, fitted) < 0.05


def test_noise_of_two_percent_costs_less_than_half_a_percent(rng):
    true = constants_like(OTHER)

    def measure(samples):
        return [us * np.exp(rng.normal() / 50) for us in timer(true)(samples)]

    fitted = tune(measure, MODEL, say=str).tiles
    times = drawn_times(true)
    assert np.mean(lost_by_choice(times, MODEL.tiles)) > 0.005
    assert np.mean(lost_by_choice(times, fitted)) < 0.005
    assert model_error(times, fitted) < 0.02


def likely_times(constants):
    """As measured for a fit."""
    return [
        Time(sizes, sample.work, sample.work.us(constants))
        for sizes in drawn_sizes()
        for sample in likely(MODEL, sizes)
    ]


@pytest.mark.parametrize(
    ("spoilt", "most"),
    [
        (lambda rng, slower: 0.6 if rng.random() < 0.05 else 1, 0.02),
        (lambda rng, slower: slower, 0.06),
    ],
    ids=["single times", "slow tilings"],
)
def test_what_the_model_does_not_describe_changes_little(spoilt, most, rng):
    times = likely_times(constants_like(OTHER))
    best = {time.sizes: time.us for time in sorted(times, key=lambda time: -time.us)}
    slower = [time.us / best[time.sizes] for time in times]
    measured = [
        replace(time, us=time.us * spoilt(rng, share))
        for time, share in zip(times, slower, strict=True)
    ]
    fitted = fit(measured, MODEL.tiles)
    fast = [time for time, share in zip(times, slower, strict=True) if share < 1.05]
    assert model_error(fast, fitted) < most


def test_a_constant_that_no_time_depends_on_is_kept():
    times = [
        Time(sizes, sample.work, 1.2 * sample.us)
        for sizes in drawn_sizes()
        for sample in likely(MODEL, sizes)
        if not sample.work.is_split
    ]
    fitted = fit(times, MODEL.tiles)
    for field in fields(TileConstants):
        is_kept = getattr(fitted, field.name) == getattr(MODEL.tiles, field.name)
        assert is_kept == (field.name in ("parts_us", "sums_bytes_per_us"))


def test_the_sizes_of_a_fit_are_always_the_same_and_within_the_limits():
    drawn = drawn_sizes()
    assert drawn == drawn_sizes() and len(set(drawn)) == module.NUM_SIZES
    for m, n, k in drawn:
        assert 1 <= m <= 8192 and 768 <= n <= 20480 and 768 <= k <= 16640
        assert n % 64 == k % 64 == 0 and n * k <= 2e8 and m * n * k <= 8e10
        assert 1 < len(likely(MODEL, (m, n, k))) <= module.MOST_LIKELY


def test_tiles_that_are_faster_than_by_the_model_are_kept():
    sizes = 512, 7168, 2048
    forecasts = predictions(FAMILY, sizes, WORKERS, MODEL.tiles)
    third, fourth = (Sample(*sizes, forecast.tiling) for forecast in forecasts[2:4])
    messages = []
    tuning = tune(timer(MODEL.tiles, third), MODEL, [sizes[1:]], messages.append)
    (entry,) = tuning.kept
    assert (entry.m, entry.n, entry.k) == sizes
    assert entry.tiles == text_of(FAMILY, third.tiling)
    choices = choose(sizes, WORKERS, FAMILY, tuning)
    assert {choice.dim: choice.value for choice in choices} == dims_of(third.tiling)
    assert any(f"512 x 7168 x 2048: {entry.tiles}, " in text for text in messages)
    again = tune(timer(MODEL.tiles, fourth), tuning, [sizes[1:]], str)
    assert again.kept == ()  # only the best three are measured


def test_of_tiles_with_equal_times_the_first_ones_are_kept():
    forecasts = predictions(FAMILY, (512, 7168, 2048), WORKERS, MODEL.tiles)
    first, *rivals = (
        Sample(512, 7168, 2048, forecast.tiling) for forecast in forecasts[:3]
    )
    times = [30.0, 20.0, 20.0]
    fast = confirm(lambda _: times, [first, *rivals], times)
    assert fast == [(20.0, rivals[0]), (20.0, rivals[1]), (30.0, first)]


@pytest.fixture
def measuring(world, monkeypatch):
    """`tune_world` with simulated times, of which each rank's are longer."""

    class Slower(MatmulTimer):
        def __init__(self, world, program, elements):
            self._world, self._program = world, program

        def _time(self, sample):
            measure = timer(MODEL.tiles, workers=self._program.workers)
            return measure([sample])[0] + self._world.rank

    monkeypatch.setattr(module, "MatmulTimer", Slower)
    monkeypatch.setattr(module, "_check_world", lambda world: None)
    monkeypatch.setattr(module, "device_of", lambda world: "NVIDIA GB99")


@pytest.mark.mpi(ranks=[2])
def test_the_slowest_rank_counts_and_all_have_its_tuning(world, measuring):
    tuning = tune_world(world, [], say=str)
    assert tuning.device == "NVIDIA GB99"
    call = MODEL.tiles.call_us + world.size - 1
    assert tuning.tiles.call_us == pytest.approx(call, rel=0.05)
    assert len({str(document) for document in world.gather(tuning.document())}) == 1


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
        tilings = Tiling(2, 48), Tiling(18, 96, 1, 2)
        samples = Sample(70, 520, 136, tilings[0]), Sample(300, 264, 136, tilings[1])
        medians = measure(samples)
    assert medians == [
        21,
        34,
    ]  # medians of 16 ... 26 and 29 ... 39, the first ones again
