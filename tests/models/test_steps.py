"""Several steps in one launch give what single launches give."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.decoder_models import MODELS
from etc_dist.emulate import Emulator
from etc_dist.errors import ArgumentError
from etc_dist.models import load
from etc_dist.models.decoder import decoder_graph
from etc_dist.models.sizes import MATMULS
from etc_dist.models.step_policy import StepPolicy
from etc_dist.runtime.cpu import simulate
from etc_dist.schedule import SCHEDULES
from tests.conftest import kept_proof
from tests.models.small import make_model
from tests.models.steps import SHAPES, tile_dims
from tests.models.test_decoder import QWEN, decoder, dims_of, draw_model, rows_of
from tests.models.test_decoder_sizes import QWEN_32B
from tests.models.test_decoder_sizes import dims_of as sizes_of

STARTS = [0, 15, 30, 33]
"""Positions of rows: of three requests, and one that belongs to none."""


def launch(run, model, ids, position, steps, end):
    """The ids [steps, rows] of a launch, which updates the cache of `model`."""
    arrays = model | rows_of(ids, [2, 0, 1, 3], position, end)
    dims = dims_of(arrays, QWEN, 3, steps=steps)
    outputs = run(arrays, dims | tile_dims(SHAPES, dict.fromkeys(MATMULS, 0)))
    model["cache"] = outputs["cache"]
    return outputs


@pytest.mark.parametrize("schedule", ["static", "dynamic", "emulated"])
def test_three_steps_give_the_bits_of_single_launches(schedule, rng, kernels):
    if schedule == "emulated":
        emulator = Emulator(decoder(), workers=2, kernels=kernels)
        run = lambda arrays, dims: emulator.run([arrays], dims)[0]  # noqa: E731
    else:
        plan = SCHEDULES[schedule](decoder())
        run = lambda arrays, dims: simulate(plan, [arrays], dims).outputs[0]  # noqa: E731
    model = draw_model(rng, QWEN, 2)
    model["cache"][...] = 0
    single = dict(model)
    ids = rng.integers(520, size=4)
    position = np.array([*STARTS[:3], -1])
    end = np.array([3, 18, 32, 0])  # the third one has two steps
    together = launch(run, model, ids, position, 3, end)["next_ids"]
    all_ids = []
    for _ in range(3):
        after = launch(run, single, ids, position, 1, end)
        ids = after["next_ids"][0]
        position = np.where((ids >= 0) & (position + 1 < end), position + 1, -1)
        all_ids.append(ids)
    np.testing.assert_array_equal(together, np.stack(all_ids))
    assert (together < 0).tolist() == [[False] * 3 + [True]] * 2 + [
        [False, False, True, True]
    ]
    bits = (of["cache"].view(np.uint16) for of in (model, single))
    np.testing.assert_array_equal(*bits)


@pytest.fixture
def model_folder(tmp_path, rng):
    return make_model(tmp_path, rng)


def cache_of(model):
    cache = model._arrays["cache"]
    return (cache if isinstance(cache, np.ndarray) else cache.get()).view(np.uint16)


@pytest.mark.mpi(ranks=[1])
def test_a_text_has_the_same_bits_at_any_number_of_steps(model_folder, rng, one_rank):
    prompts = [rng.integers(520, size=n).tolist() for n in (3, 40, 1)]
    texts, caches = [], []
    for steps in (1, 3, 16):
        with load(
            model_folder, batch=3, positions=64, steps_per_launch=steps, world=one_rank
        ) as model:
            model._arrays["cache"][...] = 0
            texts.append(model.generate(prompts, max_new_tokens=8))
            caches.append(cache_of(model))
    assert texts[0] == texts[1] == texts[2]
    for cache in caches[1:]:
        np.testing.assert_array_equal(cache, caches[0])


@pytest.mark.mpi(ranks=[1])
def test_a_stop_token_ends_one_request_and_its_cache(model_folder, rng, one_rank):
    with load(model_folder, positions=64, steps_per_launch=8, world=one_rank) as model:
        table = np.array([[0], [1]])
        step = [5, 9], [0, 1], [0, 0], table
        whole = model.steps(*step, count=8)
        stop = int(whole[2, 0])
        steps = np.flatnonzero(whole[:, 0] == stop)[0] + 1
        model._arrays["cache"][...] = 0
        stopped = model.steps(*step, count=8, stops=[[stop], []])
        assert stopped[:steps, 0].tolist() == whole[:steps, 0].tolist()
        assert stopped[steps:, 0].tolist() == [-1] * (8 - steps)
        assert stopped[:, 1].tolist() == whole[:, 1].tolist()
        is_written = cache_of(model)[:, :2, 0].any(
            axis=(2, 4)
        )  # [layers, pages, slots]
        assert is_written[:, 0].sum(axis=1).tolist() == [steps] * 2
        assert is_written[:, 1].sum(axis=1).tolist() == [8, 8]


@pytest.mark.mpi(ranks=[1])
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"count": 5}, "count is out of range"),
        ({"count": 4, "ends": [65]}, "ends from 0, below 65"),
        ({"count": 4, "ends": [1, 2]}, "equally many"),
        ({"count": 4, "stops": [range(9)]}, "at most 8 stops of each row"),
        ({"count": 4, "stops": []}, "stops of 1 rows"),
    ],
)
def test_steps_that_do_not_fit_are_refused(model_folder, one_rank, options, text):
    with load(model_folder, positions=64, steps_per_launch=4, world=one_rank) as model:
        table = np.array([[0]])
        with pytest.raises(ArgumentError, match=text):
            model.steps([1], [0], [0], table, **options)
        with pytest.raises(ArgumentError, match=r"ends\[0\] = 65"):
            model.steps([1], [0], [61], table, count=4)
        assert model.steps([1], [0], [0], table, count=4).shape == (4, 1)


@pytest.mark.exhaustive
@pytest.mark.parametrize("rows", [1, 8, 128])
def test_three_steps_of_a_deep_model_are_proved(rows):
    plan = SCHEDULES["static"](decoder_graph(1, sizes=QWEN_32B))
    dims = StepPolicy(MODELS["qwen3-32b"], 132).dims(rows, 4096)
    kept_proof(plan, sizes_of(64, rows, steps=3) | dims, 132)
