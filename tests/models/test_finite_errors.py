"""Logits that are not finite end a step with an error, and other requests go on."""

from __future__ import annotations

import numpy as np
import pytest

from etc_dist.errors import NotFiniteError
from etc_dist.models import Batch, Model, Sampling, load
from etc_dist.models.config import read_config
from etc_dist.models.part import Part
from etc_dist.models.weights import load_weights
from tests.conftest import some_of
from tests.models.references import save
from tests.models.small import CONFIG, draw_tensors, make_model
from tests.models.test_steps import cache_of
from tests.models.test_tensor_parallel import model_of_world

ONE_RANK = pytest.mark.mpi(ranks=[1])
OPTIONS = {"batch": 2, "positions": 64, "page_size": 16}
TABLE = np.arange(8).reshape(2, 4)


@pytest.fixture
def overflowing(tmp_path, rng):
    """A model whose activations exceed the numbers of float16."""
    tensors = draw_tensors(rng, CONFIG)
    for name in tensors:
        tensors[name] *= 3e4 if "down" in name else 50 if "up" in name else 1
    save(make_model(tmp_path, rng) / "model.safetensors", tensors)
    return tmp_path


@pytest.fixture
def spoiled_model(tmp_path, rng, one_rank):
    """Makes models in which the embeddings of some tokens are NaN."""
    folder = make_model(tmp_path, rng, tie_word_embeddings=False)
    config = read_config(folder)

    def spoiled_model(tokens, **options):
        weights = load_weights(folder, config, "bfloat16")
        weights["embedding"] = weights["embedding"].copy()
        weights["embedding"][tokens] = np.nan
        options |= OPTIONS | {"world": one_rank, "are_finite": True}
        return Model(config, weights, **options)

    return spoiled_model


@ONE_RANK
@pytest.mark.parametrize("sampling", [None, Sampling(top_k=5, top_p=0.9)], ids=str)
@pytest.mark.parametrize("steps", some_of([4, 1], 2))
def test_an_overflow_of_float16_gives_no_ids(overflowing, one_rank, sampling, steps):
    options = OPTIONS | {"steps_per_launch": steps, "world": one_rank}
    with load(overflowing, **options) as model:  # bfloat16
        assert len(model.generate([[5, 9]], max_new_tokens=4)[0]) == 4
    with load(overflowing, dtype="float16", **options) as model:
        with pytest.raises(NotFiniteError, match="use bfloat16") as caught:
            model.generate([[3], [5, 9]], max_new_tokens=4, sampling=sampling)
        assert caught.value.where == (
            "step 1 of 1 of a launch, row 0 (request 0, position 0), row 1 (request 1, "
            "position 1)"
        )
        assert caught.value.requests == (0, 1)
        with pytest.raises(NotFiniteError):
            list(model.stream([5, 9], max_new_tokens=4, sampling=sampling))
        assert model.pages.free_requests == 2


@ONE_RANK
def test_a_launch_ends_at_the_step_that_is_not_finite(spoiled_model):
    step = [5, 9], [0, 1], [0, 0], TABLE
    with spoiled_model([], steps_per_launch=8) as model:
        ids = model.steps(*step, count=8)
    token = ids[3, 0]  # the input of step 5
    assert token not in {*ids[:3, 0], *ids[:4, 1], 5, 9}
    with spoiled_model([token], steps_per_launch=8) as model:
        model._arrays["cache"][...] = 0
        with pytest.raises(NotFiniteError, match="compare the weights") as caught:
            model.steps(*step, count=8)
        assert caught.value.where == (
            "step 5 of 8 of a launch, row 0 (request 0, position 4)"
        )
        is_written = cache_of(model)[:, ::4, 0].any(
            axis=(2, 4)
        )  # [layers, pages, slots]
        assert is_written.sum(axis=2).tolist() == [[5, 5]] * 2
        again = model.steps([9], [1], [0], TABLE, count=3)
        assert again[:, 0].tolist() == ids[:3, 1].tolist()


@ONE_RANK
@pytest.mark.parametrize("steps", some_of([4, 1], 2))
def test_a_batch_continues_without_the_requests_of_the_error(spoiled_model, steps):
    with spoiled_model([], steps_per_launch=steps) as model:
        texts = model.generate([[1, 2, 3], [7] * 20], max_new_tokens=9)
    with spoiled_model([7], steps_per_launch=steps) as model:
        assert 7 not in texts[0]
        with Batch(model) as batch:
            first = batch.add([1, 2, 3], max_new_tokens=9)
            request = batch.add([1], max_new_tokens=9)
            batch.step()
            request.tokens[-1] = 7
            with pytest.raises(NotFiniteError) as caught:
                batch.step()
            assert caught.value.requests == (request.number,)
            batch.remove(request)
            while not batch.is_done:
                batch.step()
        assert first.new_tokens == texts[0]
        # Of pages with NaNs.
        assert model.generate([[4], [1, 2, 3]], max_new_tokens=9)[1] == texts[0]


@pytest.mark.mpi(ranks=[2])
@pytest.mark.parametrize("sampling", [None, Sampling(seed=3)], ids=str)
def test_all_ranks_raise_what_one_rank_finds(tmp_path, rng, world, sampling):
    folder = model_of_world(world, tmp_path, rng, tie_word_embeddings=False)
    config, part = read_config(folder), Part(world.rank, world.size)
    weights = load_weights(folder, config, "bfloat16", part)
    if world.rank == 1:
        weights["w_head"] = weights["w_head"].copy()
        weights["w_head"][..., -3, 5] = np.nan
    with Model(config, weights, world=world, are_finite=True, **OPTIONS) as model:
        with pytest.raises(NotFiniteError) as caught:
            model.generate([[1, 2, 3]], max_new_tokens=4, sampling=sampling)
        texts = world.gather(str(caught.value))
        assert texts == [str(caught.value)] * world.size


@ONE_RANK
def test_a_prompt_that_is_not_finite_leaves_no_pages_to_others(spoiled_model):
    """Nothing is known of its first step, which gives no id."""
    prompt = [1] * 40 + [7] * 10
    with spoiled_model([7], most_rows=45) as model, Batch(model, reuse=True) as batch:
        for _ in range(2):
            request = batch.add(prompt, max_new_tokens=4)
            assert request.reused == 0
            batch.step()
            with pytest.raises(NotFiniteError):
                batch.step()
            batch.remove(request)
        batch.add(prompt[:40], max_new_tokens=4)
        batch.step()
        assert batch.add(prompt, max_new_tokens=4).reused == 32
