"""Drafts of the next tokens: they change no id, and most of them are right where a text
repeats itself."""

from __future__ import annotations

import pytest

from etc_dist.errors import ArgumentError, NotFiniteError
from etc_dist.models import Batch, Sampling, load
from etc_dist.models import batch as batches
from etc_dist.models.drafts import Drafts
from tests.models.small import make_model

ONE_RANK = pytest.mark.mpi(ranks=[1])
OPTIONS = {"batch": 3, "positions": 96, "page_size": 16}


def test_drafts_are_what_followed_the_last_tokens():
    drafts = Drafts()
    assert drafts.propose([1, 2, 3], 4) == []
    assert drafts.propose([1, 2, 3, 4, 9, 2, 3], 2) == [4, 9]  # after 2, 3
    assert drafts.propose([1, 2, 3, 4, 9, 2, 3, 5, 1, 2, 3], 9) == [
        4,
        9,
        2,
        3,
        5,
        1,
        2,
        3,
    ]
    assert drafts.propose([1, 2, 3, 4, 9, 2, 3, 5, 1, 2, 3, 5], 3) == [1, 2, 3]
    assert drafts.propose([*range(50), 7], 3) == []


def run(model, prompts, **options):
    """The ids of requests that run together, and the batch."""
    with Batch(model) as batch:
        requests = [
            batch.add(prompt, max_new_tokens=count, **options)
            for prompt, count in prompts
        ]
        steps = 0
        while not batch.is_done:
            batch.step()
            steps += 1
    return [request.new_tokens for request in requests], batch, steps


@pytest.fixture
def folder(tmp_path, rng):
    """A model that soon repeats itself."""
    return make_model(tmp_path, rng)


@ONE_RANK
@pytest.mark.parametrize("sampling", [None, Sampling(0.3, seed=3)], ids=str)
def test_drafts_change_no_id(folder, rng, one_rank, sampling):
    loop = rng.integers(520, size=6).tolist()
    prompts = [(loop * 5, 30), (rng.integers(520, size=30).tolist(), 60), ([5], 1)]
    with load(folder, world=one_rank, **OPTIONS) as model:
        expected, batch, steps = run(model, prompts, sampling=sampling)
        assert (batch.num_drafted, batch.num_accepted) == (0, 0)
    with load(folder, world=one_rank, speculate=4, **OPTIONS) as model:
        texts, batch, fewer = run(model, prompts, sampling=sampling)
        assert model.pages.free_pages == model.pages.count
    assert texts == expected
    assert 0 < batch.num_accepted < batch.num_drafted
    assert fewer < steps


@ONE_RANK
def test_an_accepted_stop_token_ends_a_text(folder, rng, one_rank):
    prompt = rng.integers(520, size=30).tolist()
    with load(folder, world=one_rank, speculate=6, **OPTIONS) as model:
        ((ids,), batch, _) = run(model, [(prompt, 40)])
        assert batch.num_accepted > 6
        stop = ids[-1]
        ((new_ids,), _, _) = run(model, [(prompt, 40)], stop=[stop])
    assert new_ids == ids[: ids.index(stop)]


@ONE_RANK
def test_a_draft_without_finite_logits_is_no_error(folder, one_rank, monkeypatch):
    with load(folder, world=one_rank, speculate=4, **OPTIONS) as model:
        texts = model.generate([[3, 4] * 9], max_new_tokens=9)
        counts = []

        def expect_finite(rows, *_):
            count = rows.numbers.shape[1]
            if 1 < count < 10:  # with drafts
                counts.append(count)
                raise NotFiniteError("a", where="b", wanted="c", got="d", fix="e")

        monkeypatch.setattr("etc_dist.models.model.expect_finite", expect_finite)
        assert model.generate([[3, 4] * 9], max_new_tokens=9) == texts
    assert counts


@ONE_RANK
def test_wrong_drafts_that_are_kept_change_ids(folder, rng, one_rank, monkeypatch):
    """The comparison of drafts is what keeps the ids."""
    prompts = [(rng.integers(8, size=40).tolist(), 30)]
    with load(folder, world=one_rank, speculate=4, **OPTIONS) as model:
        expected, *_ = run(model, prompts)
        monkeypatch.setattr(batches, "_accepted", lambda drafts, *_: drafts)
        assert run(model, prompts)[0] != expected


@ONE_RANK
def test_steps_with_drafts_have_few_rows(folder, one_rank, monkeypatch):
    monkeypatch.setattr(batches, "MOST_REQUESTS", 3)
    monkeypatch.setattr(Drafts, "propose", lambda _, tokens, most: tokens[:most])
    most_rows = []

    class Steps(Batch):
        def _run(self, parts):
            most_rows.append(sum(count + len(drafts) for _, count, drafts in parts))
            return super()._run(parts)

    with (
        load(folder, world=one_rank, speculate=4, **OPTIONS) as model,
        Steps(model) as batch,
    ):
        batch.add([7] * 30, max_new_tokens=9)
        while not batch.is_done:
            batch.step()
    assert most_rows[0] == 30 and max(most_rows[1:]) == 3


@ONE_RANK
def test_numbers_of_drafts_are_refused(folder, one_rank):
    for options in ({"speculate": 33}, {"speculate": 1, "steps_per_launch": 2}):
        with pytest.raises(ArgumentError, match="speculate is out of range"):
            load(folder, world=one_rank, **options, **OPTIONS)


@pytest.mark.mpi
def test_ranks_draft_alike(tmp_path, rng, world):
    folder = make_model(tmp_path, rng, intermediate_size=144, vocab_size=528)
    prompts = [(rng.integers(528, size=20).tolist(), 24)]
    with load(folder, world=world, **OPTIONS) as model:
        expected, *_ = run(model, prompts)
    with load(folder, world=world, speculate=4, **OPTIONS) as model:
        texts, batch, _ = run(model, prompts)
    assert texts == expected and batch.num_accepted > 0
