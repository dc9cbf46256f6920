"""Steps with more rows than requests: long parts of prompts."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.decoder_models import MODELS
from etc_dist.emulate import Emulator
from etc_dist.errors import ArgumentError
from etc_dist.functions.tile_shape import TileShape
from etc_dist.models import Batch, Sampling, load
from etc_dist.models.decoder import decoder_graph
from etc_dist.models.part import Part
from etc_dist.models.rows import RowChecks
from etc_dist.models.step_policy import MOST_REQUESTS, ROWS, StepPolicy, mean_tiles
from etc_dist.models.weights import load_weights
from tests.models import test_experts
from tests.models.references import draw_folder
from tests.models.small import make_model
from tests.models.steps import share_dims, tile_dims
from tests.models.test_experts import step_of
from tests.models.test_model import EXPERTS

ONE_RANK = pytest.mark.mpi(ranks=[1])
IN_ORDER = (
    TileShape(16, 128, swapped=True),
    TileShape(64, 128, swapped=True),
    TileShape(128, 112),
)
"""Tiles that add over k in order."""


def host(array):
    return array if isinstance(array, np.ndarray) else array.get()


@ONE_RANK
@pytest.mark.parametrize("changes", [{}, EXPERTS], ids=["dense", "experts"])
def test_a_prompt_is_read_in_few_steps_with_the_same_result(
    changes, tmp_path, rng, one_rank
):
    folder = make_model(tmp_path, rng, **changes)
    prompts = [rng.integers(504, size=n).tolist() for n in (300, 60)]
    options = {"batch": 2, "positions": 320, "page_size": 16, "world": one_rank}
    logits, texts = [], []
    for most_rows, num_steps in ((ROWS[-1], 1), (MOST_REQUESTS, 3)):
        options["most_rows"] = most_rows
        model = load(folder, deterministic="batch", **options)
        with model, Batch(model) as batch:
            requests = [batch.add(p, max_new_tokens=3) for p in prompts]
            for _ in range(num_steps):
                batch.step()
            assert len(requests[0].new_tokens) == 1
            logits.append(host(model.logits)[requests[0].row].copy())
            while not batch.is_done:
                batch.step()
            texts.append([request.new_tokens for request in requests])
    if one_rank.backend == "cuda":
        np.testing.assert_array_equal(*(a.view(np.uint16) for a in logits))
    # NOTE: NumPy may round a row's products differently with another number of rows.
    np.testing.assert_allclose(*(a.astype(np.float32) for a in logits), 0.05, 0.05)
    assert texts[0] == texts[1]


@ONE_RANK
def test_rows_of_prompts_are_attended_in_blocks_with_the_same_result(
    tmp_path, rng, one_rank
):
    """In a step that also decodes a request. In order there are no blocks."""
    folder = make_model(tmp_path, rng)
    prompts = [rng.integers(504, size=n).tolist() for n in (30, 150, 200)]
    options = {"batch": 3, "positions": 320, "page_size": 16, "world": one_rank}
    logits, texts = [], []
    for deterministic in ("run", "batch"):
        model = load(folder, deterministic=deterministic, **options)
        with model, Batch(model) as batch:
            requests = [batch.add(prompts[0], max_new_tokens=4)]
            batch.step()
            requests += [batch.add(p, max_new_tokens=3) for p in prompts[1:]]
            batch.step()
            has_blocks = any(key[3] for key in model._bound)
            assert has_blocks == (deterministic == "run")
            logits.append(host(model.logits)[[request.row for request in requests]])
            while not batch.is_done:
                batch.step()
            texts.append([request.new_tokens for request in requests])
    np.testing.assert_allclose(*(a.astype(np.float32) for a in logits), 0.05, 0.05)
    assert texts[0] == texts[1]


@ONE_RANK
def test_the_rows_of_prompts_are_the_last_ones(tmp_path, rng, one_rank, monkeypatch):
    folder, of_steps = make_model(tmp_path, rng), []
    check = RowChecks.check

    def recording_check(*rows, **options):
        of_steps.append(rows[2])
        return check(*rows, **options)

    monkeypatch.setattr(RowChecks, "check", recording_check)
    options = {"positions": 64, "batch": 2, "most_rows": 32, "world": one_rank}
    with load(folder, **options) as model, Batch(model) as batch:
        for count in (20, 40):
            batch.add([*range(count)], max_new_tokens=1)
        batch.step()
    assert of_steps == [[0] + 12 * [1] + 19 * [0]]


@pytest.mark.exhaustive
@pytest.mark.parametrize("settings", [test_experts.QWEN], ids=["experts"])
def test_the_cuda_bodies_give_the_bits_of_steps_with_few_rows(settings, tmp_path, rng):
    """A step with many rows, and others with its first and its last positions."""
    config = draw_folder(tmp_path, rng, settings, ())
    weights = load_weights(tmp_path, config, "bfloat16", Part(0, 1))
    graph = decoder_graph(1, sizes=config.sizes(16), shapes=IN_ORDER, best_columns=64)
    emulator = Emulator(graph, workers=4)
    step, dims = step_of(config, [90, 60], 0, rng)
    dims |= {"all_ids": config.vocabulary} | share_dims(1, cuts=1)
    rows, matmuls = step["position"], config.sizes(16).matmuls
    of_rows = {n: a for n, a in step.items() if len(a) == len(rows)}
    whole, cache = {}, step["cache"]
    for number, is_in in ((2, rows >= 0), (0, rows < 50), (1, rows >= 50)):
        arrays = weights | step | {n: a[is_in] for n, a in of_rows.items()}
        arrays["experts"] = step["experts"][:, is_in]
        arrays["cache"] = cache.copy()
        tiles = tile_dims(IN_ORDER, dict.fromkeys(matmuls, number))
        count = dict.fromkeys(("rows", "outputs"), int(is_in.sum()))
        [outputs] = emulator.run([arrays], dims | tiles | count)
        if not whole:
            whole = outputs
            continue
        cache = outputs["cache"]
        for name in ("logits", "experts"):
            axis = int(name == "experts")
            expected = np.compress(is_in, whole[name], axis)
            assert outputs[name].tobytes() == expected.tobytes()
    assert cache.tobytes() == whole["cache"].tobytes()


@ONE_RANK
def test_numbers_of_rows_are_refused(tmp_path, rng, one_rank):
    folder = make_model(tmp_path, rng)
    for most_rows in (7, ROWS[-1] + 1):
        with pytest.raises(ArgumentError, match="most_rows: an integer from 8 to 2048"):
            load(folder, most_rows=most_rows, world=one_rank)
    options = {"steps_per_launch": 2, "most_rows": 200, "world": one_rank}
    with load(folder, positions=256, batch=1, page_size=128, **options) as model:
        for count, most in ((2, MOST_REQUESTS), (1, 200)):
            rows, table = np.arange(most + 1), np.array([[0, 1]])
            words = f"of 1 to {most} rows"
            with pytest.raises(ArgumentError, match=words) as caught:
                model.steps(0 * rows, 0 * rows, rows, table, count=count)
            error = caught.value
            assert error.where == "model.step" and f"'ids': {most + 1}" in error.got
            assert error.what and error.fix
            rows = rows[:-1]
            ids = model.steps(0 * rows, 0 * rows, rows, table, count=count)
            assert ids.shape == (count, most)


@ONE_RANK
def test_the_first_rows_alone_get_ids_and_logits(tmp_path, rng, one_rank):
    folder, ids = make_model(tmp_path, rng), rng.integers(504, size=200)
    options = {"positions": 208, "batch": 1, "page_size": 16, "world": one_rank}
    table = np.arange(13)[None]
    step = np.roll(ids, 5), 0 * ids, np.roll(np.arange(200), 5), table
    with load(folder, deterministic="batch", **options) as model:
        whole = model.steps(*step, count=1)[0]
        logits = host(model.logits).astype(np.float32)
        assert whole.shape == (200,) and len(logits) == 200
        for outputs in (5, 1, 150):
            some = model.steps(*step, count=1, outputs=outputs)[0]
            np.testing.assert_array_equal(some, whole[:outputs])
            some_logits = host(model.logits).astype(np.float32)
            # NOTE: NumPy may round a row's products differently with fewer rows.
            np.testing.assert_allclose(some_logits, logits[:outputs], 0.05, 0.05)
        for outputs in (0, 201):
            with pytest.raises(ArgumentError, match="outputs: an integer from 1 to"):
                model.steps(*step, count=1, outputs=outputs)


@ONE_RANK
def test_rows_whose_ids_are_known_are_not_sampled(tmp_path, rng, one_rank, monkeypatch):
    folder, sampling, samplings = make_model(tmp_path, rng), Sampling(seed=3), []
    check = RowChecks.check

    def recording_check(*rows, **options):
        samplings.append(options["sampling"])
        return check(*rows, **options)

    monkeypatch.setattr(RowChecks, "check", recording_check)
    options = {"positions": 64, "batch": 1, "most_rows": 16, "world": one_rank}
    with load(folder, **options) as model, Batch(model) as batch:
        batch.add([*range(20)], max_new_tokens=2, sampling=sampling)
        while not batch.is_done:
            batch.step()
    assert samplings == [None, [sampling] + [None] * 3, [sampling]]


@ONE_RANK
def test_memory_for_long_prompts_is_allocated_with_the_first_one(
    tmp_path, rng, one_rank
):
    folder = make_model(tmp_path, rng)
    with load(folder, positions=320, batch=2, world=one_rank) as model:
        # Each row has its own position: 640 of them, with padding.
        for rows, most in ((1, MOST_REQUESTS), (192, 768)):
            demand = model.program._capacity_hint({"rows": rows})
            assert max(dims["rows"] for dims in demand) == most


@pytest.mark.parametrize(
    ("name", "heights"),
    [
        ("qwen3-30b-a3b", {64: 16, 128: 32, 192: 32, 512: 64}),
        ("gpt-oss-20b", {128: 64, 192: 64, 512: 128}),
    ],
)
def test_experts_with_many_rows_have_tall_tiles(name, heights):
    policy = StepPolicy(MODELS[name], 132)
    for rows, height in heights.items():
        number = policy.dims(rows, 512)["expert_up_shape"]
        assert policy.shapes_of("expert_up")[number].rows == height


def test_the_mean_number_of_tiles_is_that_of_drawn_choices(rng):
    for rows, share, height in ((192, 1 / 16, 8), (512, 1 / 4, 64), (256, 1, 128)):
        counts = rng.binomial(rows, share, 10_000)
        drawn = (-(-counts // height)).mean()
        assert mean_tiles(rows, share, height) == pytest.approx(drawn, rel=0.01)
