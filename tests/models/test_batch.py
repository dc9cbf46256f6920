"""Requests that join and leave between steps, and the pages of the cache."""

from __future__ import annotations

import gc
import os
import tracemalloc
import weakref
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import pytest

from etc_dist.errors import ArgumentError, WorldError
from etc_dist.models import Batch, Sampling, load
from etc_dist.models import batch as batches
from etc_dist.models.pages import PageTable
from etc_dist.settings import Settings
from etc_dist.world import start
from tests.conftest import some_of
from tests.models.small import make_model

ONE_RANK = pytest.mark.mpi(ranks=[1])
OPTIONS = {"batch": 3, "positions": 64, "page_size": 16}


@pytest.fixture
def folder(tmp_path, rng):
    return make_model(tmp_path, rng)


@ONE_RANK
@pytest.mark.parametrize("steps", [4, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_requests_that_join_and_leave_do_not_change_others(
    folder, rng, one_rank, steps
):
    prompts = [rng.integers(520, size=n).tolist() for n in (3, 40, 1, 17, 8, 2)]
    choices = [None, Sampling(seed=4), Sampling(2.0, top_k=9)] * 2
    counts = [6, 3, 9, 2, 1, 7]
    with load(folder, steps_per_launch=steps, world=one_rank, **OPTIONS) as model:
        alone = [
            model.generate([p], max_new_tokens=n, sampling=s)[0]
            for p, n, s in zip(prompts, counts, choices, strict=True)
        ]
        waiting = list(zip(prompts, counts, choices, strict=True))
        requests, num_ended = [], 0
        with Batch(model) as batch:
            leaver = batch.add([5] * 9)  # leaves before its end
            while waiting or not batch.is_done:
                while waiting and batch.has_room(len(waiting[0][0]) + waiting[0][1]):
                    prompt, count, sampling = waiting.pop(0)
                    requests.append(
                        batch.add(prompt, max_new_tokens=count, sampling=sampling)
                    )
                num_ended += sum(request.is_done for request in batch.step())
                if len(requests) == 4 and not leaver.is_done:
                    batch.remove(leaver)
                    leaver.is_done = True
        assert [request.new_tokens for request in requests] == alone
        assert num_ended == len(prompts)
        assert model.pages.free_pages == model.pages.count == 12


# NumPy may round a row's products differently with another number of rows.
@ONE_RANK
@pytest.mark.gpu
def test_logits_may_have_the_same_bits_in_each_batch(folder, rng, one_rank):
    options = {"batch": 3, "positions": 300, "page_size": 16, "world": one_rank}
    prompt, more_ids = (rng.integers(520, size=n).tolist() for n in (20, 290))
    table = np.arange(3 * 19, dtype=np.int32).reshape(3, 19)
    positions = list(range(20))
    with load(folder, deterministic="batch", **options) as model:
        model.step(prompt, [0] * 20, positions, table)
        expected = model.logits.get()
        for at in range(0, 290, 100):  # a longer request, whose rows join the prompt's
            more = list(range(at, min(at + 100, 290)))
            ids = [*prompt, *(more_ids[p] for p in more)]
            requests = [0] * 20 + [1] * len(more)
            model.step(ids, requests, [*positions, *more], table)
            np.testing.assert_array_equal(model.logits.get()[:20], expected)
        for at in positions:
            model.step([prompt[at]], [2], [at], table)
            np.testing.assert_array_equal(model.logits.get()[0], expected[at])


@ONE_RANK
def test_a_full_cache_refuses_requests_until_one_ends(folder, one_rank):
    with load(folder, pages=6, world=one_rank, **OPTIONS) as model:
        texts = model.generate([[3] * 4], max_new_tokens=2)
        with Batch(model) as batch:
            first = batch.add([3] * 4, max_new_tokens=2)
            batch.add([1] * 30, max_new_tokens=34)
            assert not batch.has_room(32)
            assert batch.has_room(16)
            with pytest.raises(ArgumentError) as caught:
                batch.add([2] * 8, max_new_tokens=24)
            assert "the cache is full" in str(caught.value)
            assert caught.value.wanted == "2 free pages of 16 positions"
            assert caught.value.got == "1 free pages of 6"
            while not first.is_done:
                batch.step()
            batch.add([2] * 8, max_new_tokens=24)
            assert model.pages.free_pages == 0
        assert [first.new_tokens] == texts
        assert model.pages.free_pages == 6
        with pytest.raises(ArgumentError, match="the cache is full"):
            model.generate([[1], [2]])
        assert model.generate([[3] * 4], max_new_tokens=2) == texts


@ONE_RANK
@pytest.mark.parametrize("steps", [1, 4])
def test_a_step_that_fails_leaves_the_model_usable(folder, one_rank, steps):
    options = OPTIONS | {"steps_per_launch": steps, "world": one_rank}
    with load(folder, **options) as model:
        texts = model.generate([[3, 4]], max_new_tokens=6)
        with Batch(model) as batch:
            request = batch.add([3, 4], max_new_tokens=6)
            batch.step()
            table, tokens = model.pages.table, request.tokens[-1]
            page, table[0, 0] = table[0, 0], model.pages.count
            with pytest.raises(ArgumentError, match="on pages of the table"):
                batch.step()
            table[0, 0], request.tokens[-1] = page, 520
            with pytest.raises(ArgumentError, match=r"ids\[0\] = 520"):
                batch.step()
            request.tokens[-1] = tokens
            while not batch.is_done:
                batch.step()
        assert [request.new_tokens] == texts


@pytest.mark.mpi
@pytest.mark.parametrize("leave", ["drop", "raise"])
def test_a_model_that_is_left_gives_its_memory_back(leave, tmp_path, rng):
    world = start(Settings(backend="cpu"))
    folder = make_model(tmp_path, rng, intermediate_size=144, vocab_size=528)

    def use() -> list[weakref.ref[Any]]:
        model = load(folder, world=world, **OPTIONS)
        things = [model, model.pages, model._arrays["cache"], model._arrays["w_o"]]
        alive = [weakref.ref(reference) for reference in things]
        with suppress(ZeroDivisionError):
            if leave == "raise":
                with model:
                    model.generate([[3, 4]], max_new_tokens=1)
                    raise ZeroDivisionError
            model.generate([[3, 4]], max_new_tokens=1)
        return alive

    gc.collect()  # what earlier tests have left
    counts = []
    for _ in range(2):
        alive = use()
        gc.collect()
        assert [reference() for reference in alive] == [None] * 4
        world.synchronize()
        counts.append((len(os.listdir("/proc/self/fd")), len(world._runs)))
    assert counts[0] == counts[1]
    assert world._runs == {} and world._memories == {}
    world.close()


@pytest.mark.mpi
def test_dropped_batches_give_their_places_back(tmp_path, rng, world):
    folder = make_model(tmp_path, rng, intermediate_size=144, vocab_size=528)
    with load(folder, pages=6, world=world, **OPTIONS) as model:
        dropped = Batch(model)
        requests = [dropped.add([1] * 30, max_new_tokens=2) for _ in range(3)]
        with Batch(model) as batch:
            with pytest.raises(ArgumentError, match="more requests than"):
                batch.add([2], max_new_tokens=1)
            del dropped
            assert batch.has_room() is (world.size == 1)
            batch.add([2], max_new_tokens=1)
            assert model.pages.free_requests == 2
        assert len(requests) == 3
        assert model.pages.free_pages == 6


@ONE_RANK
def test_a_world_that_breaks_in_a_step_gives_no_ids(folder, one_rank, monkeypatch):
    world = start(Settings(backend="cpu", verify=0))
    with load(folder, **OPTIONS, world=world) as model:
        # At the end of a launch, as another thread may.
        leave = partial(world.leave, "the server ends")
        monkeypatch.setattr(model.program._run_check, "warn", leave)
        with pytest.raises(WorldError, match="the server ends"):
            model.generate([[3, 4]], max_new_tokens=1)
    world.close()


@ONE_RANK
def test_requests_that_cannot_be_stepped_do_not_break_the_world(
    folder, one_rank, monkeypatch
):
    with load(folder, world=one_rank, **OPTIONS) as model:
        texts = model.generate([[3, 4]], max_new_tokens=2)
        with Batch(model) as batch:
            request = batch.add([3, 4], max_new_tokens=2)
            second = batch.add([5], max_new_tokens=1)
            request.tokens.clear()  # by mistake
            with pytest.raises((IndexError, ValueError)):
                batch.step()
            request.tokens.extend([3, 4])
            extend = batches._extend

            def removes(extended, tokens):  # as another thread during a step
                extend(extended, tokens)
                if extended is second:
                    batch.remove(second)

            monkeypatch.setattr(batches, "_extend", removes)
            batch.step()
            batch.step()
        assert [request.new_tokens] == texts


@ONE_RANK
def test_fewer_pages_than_a_request_needs_are_refused(folder, one_rank):
    with pytest.raises(ArgumentError, match="pages is out of range"):
        load(folder, pages=3, world=one_rank, **OPTIONS)


def test_pages_are_used_again_and_never_twice(rng):
    pages = PageTable(8, 4, 16, 20)
    numbers: list[int] = []
    for _ in range(200):
        length = int(rng.integers(1, 65))
        if numbers and (rng.random() < 0.4 or not pages.free_requests):
            pages.remove(numbers.pop(rng.integers(len(numbers))))
        elif pages.needed(length) <= pages.free_pages:
            numbers.append(pages.add(length))
        page_ids = pages.table[pages.table >= 0]
        assert len(np.unique(page_ids)) == len(page_ids) == 20 - pages.free_pages
        assert pages.free_requests == 8 - len(numbers)


def test_pages_are_found_by_their_keys_until_they_are_needed(rng):
    pages = PageTable(6, 4, 16, 14)
    texts: dict[int, list[bytes]] = {}
    contents: dict[int, bytes] = {}
    num_reused = 0
    for _ in range(400):
        keys = [bytes([n, k]) for n, k in enumerate(rng.integers(2, size=4))]
        keys = [b"".join(keys[: n + 1]) for n in range(4)]
        prefix = pages.find(keys[:3])
        assert [contents[page] for page in prefix] == keys[: len(prefix)]
        is_free = pages.free_requests and pages.needed(64, prefix) <= pages.free_pages
        if texts and (rng.random() < 0.4 or not is_free):
            number = list(texts)[rng.integers(len(texts))]
            texts.pop(number)
            pages.remove(number)
        elif is_free:
            number = pages.add(64, None, prefix)
            page_ids = pages.table[number].tolist()
            assert page_ids[: len(prefix)] == prefix
            fresh = page_ids[len(prefix) :]
            assert not {*fresh}.intersection(*(pages.table[n] for n in texts), prefix)
            num_reused += len(prefix)
            contents.update(zip(fresh, keys[len(prefix) :], strict=True))
            texts[number] = keys
            pages.keep(number, len(prefix), keys[len(prefix) : rng.integers(5)])
        all_ids = {page for number in texts for page in pages.table[number].tolist()}
        assert len(all_ids) == 14 - pages.free_pages
    assert num_reused > 100


@ONE_RANK
@pytest.mark.parametrize("steps", some_of([4, 1], 2))
def test_requests_begin_with_the_pages_of_others(folder, rng, one_rank, steps):
    first = rng.integers(520, size=32).tolist()
    ids = rng.integers(520, size=32).tolist()
    mixed = [*first[:16], *ids[16:], 7]  # both pages are known, not in this order
    waiting = [[*first, 7], [*ids, 7], first, mixed, [*first, *first[:9]]]
    with load(folder, steps_per_launch=steps, world=one_rank, **OPTIONS) as model:
        texts = [model.generate([p], max_new_tokens=6)[0] for p in waiting]
        waiting.append([*waiting[0], *texts[0][:-1], 3])  # continues an answer
        texts += model.generate(waiting[-1:], max_new_tokens=6)
        requests = []
        with Batch(model, reuse=True) as batch:
            while len(requests) < len(waiting) or not batch.is_done:
                if len(requests) < len(waiting) and batch.has_room(64):
                    prompt = waiting[len(requests)]
                    requests.append(batch.add(prompt, max_new_tokens=6))
                batch.step()
        assert [request.new_tokens for request in requests] == texts
        assert [request.reused for request in requests] == [0, 0, 16, 16, 32, 32]
        assert model.pages.free_pages == model.pages.count
        # Steps with another table may write any page.
        model.step([5], [0], [0], [[0]])
        with Batch(model, reuse=True) as batch:
            assert batch.add(waiting[0]).reused == 0


@pytest.mark.mpi
def test_ranks_share_pages_alike(tmp_path, rng, world):
    folder = make_model(tmp_path, rng, intermediate_size=144, vocab_size=528)
    prompts = [rng.integers(528, size=n).tolist() for n in (40, 20)]
    with load(folder, world=world, **OPTIONS) as model:
        texts = model.generate(prompts, max_new_tokens=4)
        with Batch(model, reuse=True) as batch:
            for reused in (0, 32):
                requests = [batch.add(p, max_new_tokens=4) for p in prompts]
                assert requests[0].reused == reused
                while not batch.is_done:
                    batch.step()
                assert [request.new_tokens for request in requests] == texts


# NumPy may round a row's products differently with another number of rows.
@ONE_RANK
@pytest.mark.gpu
def test_pages_of_others_change_no_bit(folder, rng, one_rank):
    options = {"deterministic": "batch", "world": one_rank} | OPTIONS
    prompt = rng.integers(520, size=50).tolist()
    results = []
    with load(folder, **options) as model:
        for reuse in (False, True, True):
            with Batch(model, reuse=reuse) as batch:
                request = batch.add(prompt, max_new_tokens=1)
                batch.step()
                results.append(
                    (request.reused, model.logits.get()[request.row].tobytes())
                )
    assert [reused for reused, _ in results] == [0, 0, 48]
    assert len({logits for _, logits in results}) == 1


def test_free_pages_take_little_memory():
    tracemalloc.start()
    pages = PageTable(128, 8, 16, 10**6)
    pages.add(100)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert pages.free_pages == 10**6 - 7
    assert peak < 5 * 10**6  # of the counts of written positions
