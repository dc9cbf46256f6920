"""Models: texts of many lengths by one program."""

from __future__ import annotations

import numpy as np
import pytest

from etc_dist.models import Sampling, load
from etc_dist.models.config import read_config
from tests.conftest import some_of
from tests.models.references import MIXTRAL, Plain, draw_folder
from tests.models.small import make_model

pytestmark = pytest.mark.mpi(ranks=[1])
KINDS = ["Qwen3ForCausalLM", "LlamaForCausalLM"]


@pytest.fixture
def folder(tmp_path, rng):
    return make_model(tmp_path, rng)


def expect_best(folder, prompt, new):
    """Each new id has the largest logit after those before, but for rounding."""
    plain = Plain(folder, read_config(folder))
    logits = plain.logits([*prompt, *new], plain.start())[len(prompt) - 1 : -1]
    logits_of_ids = logits[np.arange(len(new)), new]
    assert np.all(logits_of_ids > logits.max(axis=1) - 0.05 * np.abs(logits).max())


@pytest.mark.parametrize("kind", some_of(KINDS, 2))
def test_prompts_of_many_lengths_are_continued(kind, tmp_path, rng, one_rank):
    folder = make_model(tmp_path, rng, architectures=[kind])
    prompts = [rng.integers(520, size=n).tolist() for n in (1, 150, 7)]
    with load(folder, positions=200, page_size=16, world=one_rank) as model:
        texts = model.generate(prompts, max_new_tokens=4)
        assert [len(new) for new in texts] == [4, 4, 4]
        for prompt, new in zip(prompts, texts, strict=True):
            expect_best(folder, prompt, new)
        alone = [model.generate([prompt], max_new_tokens=4)[0] for prompt in prompts]
        assert alone == texts


EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "moe_intermediate_size": 40,
    "norm_topk_prob": True,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "tie_word_embeddings": True,
}
SMALL_MIXTRAL = MIXTRAL | {"hidden_size": 64, "num_hidden_layers": 2}


@pytest.mark.parametrize("kind", ["qwen3-moe", "mixtral"])
def test_a_mixture_of_experts_continues_prompts(kind, tmp_path, rng, one_rank):
    if kind == "mixtral":
        draw_folder(tmp_path, rng, SMALL_MIXTRAL)
    else:
        make_model(tmp_path, rng, **EXPERTS)
    prompts = [rng.integers(504, size=n).tolist() for n in (1, 40, 7)]
    with load(tmp_path, positions=64, page_size=16, world=one_rank) as model:
        texts = model.generate(prompts, max_new_tokens=3)
    for prompt, new in zip(prompts, texts, strict=True):
        expect_best(tmp_path, prompt, new)


@pytest.mark.parametrize("is_tied", [True, False])
def test_ids_of_padding_are_never_chosen(is_tied, tmp_path, rng, one_rank):
    changes = {"vocab_size": 9, "tie_word_embeddings": is_tied}
    folder = make_model(tmp_path, rng, **changes)
    sampling = [None, Sampling(100.0), Sampling(100.0, top_k=12, top_p=0.9, seed=3)]
    with load(folder, batch=3, positions=96, world=one_rank) as model:
        texts = model.generate([[8, 1]] * 3, max_new_tokens=48, sampling=sampling)
        assert model.logits.shape[1] == 9
    assert set(texts[1]) == set(texts[2]) == set(range(9))
    expect_best(folder, [8, 1], texts[0])


def test_a_stop_token_ends_a_text(folder, one_rank):
    with load(folder, positions=128, world=one_rank) as model:
        (whole,) = model.generate([[3, 5]], max_new_tokens=6)
        end = whole.index(whole[3])
        assert model.generate([[3, 5]], stop=[whole[3]]) == [whole[:end]]
        assert list(model.stream([3, 5], stop=[whole[3]])) == whole[:end]


def test_pages_are_used_again(folder, one_rank):
    with load(folder, batch=2, positions=32, page_size=16, world=one_rank) as model:
        first = model.generate([[1] * 20, [2]], max_new_tokens=3)
        next(model.stream([4, 5]))  # left before its end
        for _ in range(3):
            assert model.generate([[1] * 20, [2]], max_new_tokens=3) == first


def test_a_step_returns_ids_and_logits(folder, rng, one_rank):
    with load(folder, batch=3, positions=64, world=one_rank) as model:
        table = np.array([[2], [0]], np.int32)
        ids = rng.integers(520, size=5)
        next_ids = model.step(ids, [0, 1, 0, 0, 1], [0, 0, 1, 2, 1], table)
        logits = model.logits
        logits = (logits if isinstance(logits, np.ndarray) else logits.get()).astype(
            np.float32
        )
        assert logits.shape == (5, 520)
        np.testing.assert_array_equal(logits.argmax(axis=1), next_ids)
        expect_best(folder, ids[[0, 2, 3]].tolist(), [int(next_ids[3])])


def test_all_steps_have_few_shapes(folder, one_rank):
    with load(folder, positions=256, world=one_rank) as model:
        for length in (1, 5, 6, 7, 21, 23):
            model.generate([[7] * length], max_new_tokens=1)
        assert {key[0] for key in model._bound} == {1, 6, 8, 24}
