"""Texts by chance: reproducible from a seed, in any batch."""

from __future__ import annotations

import numpy as np
import pytest

from etc_dist.errors import ArgumentError
from etc_dist.models import Sampling, load
from tests.conftest import some_of
from tests.models.small import make_model
from tests.models.test_tensor_parallel import DRAWN, ids_of_one_rank, split_model

ONE_RANK = pytest.mark.mpi(ranks=[1])
RANKS = pytest.mark.mpi(ranks=[2])


@pytest.fixture
def folder(tmp_path, rng):
    return make_model(tmp_path, rng)


@ONE_RANK
def test_a_text_depends_on_its_seed_alone(folder, one_rank):
    options = {"batch": 4, "positions": 64, "world": one_rank}
    warm = Sampling(temperature=2.0, top_k=40, top_p=0.9, seed=11)
    with load(folder, steps_per_launch=4, **options) as model:
        (alone,) = model.generate([[5, 6]], max_new_tokens=6, sampling=warm)
        samplings = [None, warm, Sampling(seed=3), Sampling(seed=11, top_p=0.5)]
        prompts = [[9] * 20, [5, 6], [5, 6], [7]]
        texts = model.generate(prompts, max_new_tokens=6, sampling=samplings)
        assert texts[1] == alone
        assert texts[2] != alone
        assert texts[0] == model.generate([[9] * 20], max_new_tokens=6)[0]
        assert list(model.stream([5, 6], max_new_tokens=6, sampling=warm)) == alone
        sampling = Sampling(temperature=2.0, top_k=40, top_p=0.9, seed=12)
        assert model.generate([[5, 6]], max_new_tokens=6, sampling=sampling) != [alone]
    with load(folder, **options) as model:  # one step a launch
        assert model.generate([[5, 6]], max_new_tokens=6, sampling=warm) == [alone]


@ONE_RANK
@pytest.mark.parametrize(
    "sampling", [Sampling(0.0), Sampling(5.0, top_k=1), Sampling(top_p=1e-6)]
)
def test_without_choice_the_most_likely_ids_follow(folder, one_rank, sampling):
    with load(folder, positions=64, world=one_rank) as model:
        expected = model.generate([[1, 2, 3]], max_new_tokens=6)
        assert (
            model.generate([[1, 2, 3]], max_new_tokens=6, sampling=sampling) == expected
        )


@ONE_RANK
def test_ids_of_a_step_have_the_probabilities_of_its_logits(folder, one_rank):
    with load(folder, batch=128, positions=16, world=one_rank) as model:
        table = np.arange(128, dtype=np.int32)[:, None]
        of_rows = [7] * 128, range(128), [0] * 128, table  # with equal logits
        drawn_ids = np.concatenate(
            [
                model.steps(
                    *of_rows,
                    count=1,
                    sampling=[Sampling(0.5, seed=n * 128 + r) for r in range(128)],
                )[0]
                for n in range(4)
            ]
        )
        logits = model.logits
        logits = logits[0] if isinstance(logits, np.ndarray) else logits[0].get()
        weights = np.exp(2 * logits.astype(np.float64))
        order = np.argsort(-weights)
        parts = np.split(order, [5, 20, 60, 150])
        probabilities = np.array([weights[p].sum() for p in parts]) / weights.sum()
        counts = np.array([np.isin(drawn_ids, p).sum() for p in parts])
        expected = probabilities * len(drawn_ids)
        # Of 4 degrees of freedom, 1 in 1000 is above 18.5. The seeds are fixed.
        assert ((counts - expected) ** 2 / expected).sum() < 18.5


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"temperature": -1.0}, ArgumentError, "a temperature of 0, or of 0.01 .. 100"),
        ({"temperature": float("nan")}, ArgumentError, "temperature = nan"),
        ({"top_p": 0.0}, ArgumentError, "0 < top_p <= 1"),
        ({"top_p": 1.5}, ArgumentError, "top_p = 1.5"),
        ({"top_k": -1}, ArgumentError, "top_k is out of range"),
        ({"top_k": 2.5}, TypeError, "top_k expects an int"),
        ({"seed": 2**64}, ArgumentError, "seed is out of range"),
        ({"temperature": "hot"}, TypeError, "temperature expects"),
    ],
)
def test_numbers_out_of_range_are_refused(options, kind, text):
    with pytest.raises(kind, match=text):
        Sampling(**options)


@ONE_RANK
def test_one_sampling_for_each_prompt_is_expected(folder, one_rank):
    with load(folder, positions=64, world=one_rank) as model:
        with pytest.raises(ArgumentError, match="there is not one sampling for each"):
            model.generate([[1], [2]], max_new_tokens=1, sampling=[Sampling()])
        with pytest.raises(TypeError, match="sampling expects"):
            model.generate([[1]], max_new_tokens=1, sampling=0.7)


@RANKS
@pytest.mark.parametrize("schedule", some_of(["static", "dynamic"], 2))
def test_ranks_draw_the_ids_of_one_rank(schedule, world, tmp_path, rng):
    folder = split_model(tmp_path, rng, 2)
    ids, num_rows = rng.integers(576, size=len(DRAWN)), len(DRAWN)
    rows = ids, [0] * num_rows, range(num_rows), [[0]]
    with load(folder, positions=64, schedule=schedule, world=world) as model:
        next_ids = model.steps(*rows, count=1, sampling=DRAWN)
        rank_logits = model.logits if world.backend == "cpu" else model.logits.get()
        logits = np.concatenate(world.gather(rank_logits.astype(np.float32)), axis=1)
        assert next_ids[0].tolist() == ids_of_one_rank(logits)
        texts = [
            model.generate([[1, 2]], max_new_tokens=8, sampling=sampling)
            for sampling in (DRAWN[0], DRAWN[0], DRAWN[4])
        ]
        assert world.gather(texts) == [texts] * world.size
        assert texts[0] == texts[1] != texts[2]
