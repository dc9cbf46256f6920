"""Models that ranks cannot split, and calls that differ between ranks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from etc_dist.errors import ArgumentError
from etc_dist.models import load
from etc_dist.models.config import read_config
from etc_dist.models.decoder import DecoderSizes, decoder_graph
from etc_dist.models.part import check_ranks
from etc_dist.models.setup import ModelSetup
from etc_dist.verify.races import MOST_SUSPECTS
from tests.models.small import make_model
from tests.models.steps import SHAPES, plan_data, share_dims
from tests.models.test_decoder_sizes import dims_of
from tests.models.test_tensor_parallel import (
    PAGE,
    POSITIONS,
    SPLIT_EXPERTS,
    split_model,
)
from tests.refusals import refused
from tests.verify.waits import Proved, change

GRAPH = decoder_graph(
    2,
    sizes=DecoderSizes(3, 1, 64, normalizes_heads=True, page_size=16),
    shapes=SHAPES,
    best_columns=64,
)
DIMS = {**dims_of(layers=5, rows=3, ranks=2), **share_dims(2), "steps": 2}
DIMS |= {"hidden": 72, "inner": 136, "vocabulary": 520, "all_ids": 1040, "samples": 1}
PROVED = Proved(GRAPH, DIMS, plan_data(DIMS, ranks=2))
SENT = [
    (call.name, n)
    for call in GRAPH.calls
    for n, wait in enumerate(call.waits)
    if wait.events.cross_rank
]
"""Waits for what peers send."""
WAITS = [*SENT, ("push_logits", 0), ("sample_column", 0)]
"""And those between logits and ids by chance, which peers wait for."""
OPTIONS = {"batch": 1, "positions": POSITIONS, "page_size": PAGE}
TABLE = np.arange(2)[None]


@pytest.mark.parametrize(
    ("ranks", "changes", "text"),
    [
        (3, {"num_attention_heads": 8}, "8 heads, a multiple of the ranks"),
        (3, {"num_key_value_heads": 2}, "2 KV heads, a multiple or a divisor of"),
        (4, {"intermediate_size": 200}, "inner width 200, a multiple of 8 on each"),
        (4, {"vocab_size": 24}, "vocabulary 24, with ids on each rank"),
    ],
)
def test_sizes_that_ranks_cannot_split_are_named(ranks, changes, text, tmp_path, rng):
    sizes = {"num_attention_heads": 12, "intermediate_size": 192, "vocab_size": 576}
    config = read_config(make_model(tmp_path, rng, **(sizes | changes)))
    words = f"{text}|to do: start another number of ranks"
    error = refused(lambda: check_ranks(config, ranks), words, ArgumentError)
    assert "experts" not in str(error)
    check_ranks(config, 1)


def test_experts_that_ranks_cannot_have_are_named(tmp_path, rng):
    sizes = {"num_attention_heads": 12, "vocab_size": 576}
    config = read_config(make_model(tmp_path, rng, **(sizes | SPLIT_EXPERTS)))
    with pytest.raises(ArgumentError, match="16 experts, a(.|\n)*experts= of load"):
        check_ranks(config, 3, has_experts=True)
    dense = replace(config, mixture=None)
    for words, setup in (
        ("no experts that ranks", ModelSetup(dense, experts="parallel")),
        ("known experts", ModelSetup(config, experts="all")),
    ):
        with pytest.raises(ArgumentError, match=words):
            setup.check()


@pytest.mark.parametrize("schedule", ["static", "dynamic"])
@pytest.mark.parametrize(("name", "number"), WAITS)
def test_a_missing_wait_for_peers_is_refused_with_its_layer(name, number, schedule):
    loop = "layer=" if PROVED.call(name).loops == 2 else "step="
    assert loop in PROVED.lacks(schedule, name, number)


@pytest.mark.parametrize("most", [0, MOST_SUSPECTS])
@pytest.mark.parametrize("schedule", ["static", "dynamic"])
def test_a_buffer_that_peers_may_still_read_is_refused_with_its_layer(
    schedule, most, monkeypatch
):
    """Both sums of a layer in one buffer. most: pairs that the proof keeps."""
    monkeypatch.setattr("etc_dist.verify.races.MOST_SUSPECTS", most)
    PROVED.check(schedule)
    parts = GRAPH.tensor("o_parts")

    def moved(regions):
        return tuple(
            replace(region, tensor=parts)
            if region.tensor.name == "down_parts"
            else region
            for region in regions
        )

    graph = change(
        GRAPH, "down_matmul", writes=moved(PROVED.call("down_matmul").writes)
    )
    graph = change(graph, "add_norm", reads=moved(PROVED.call("add_norm").reads))
    refused(lambda: PROVED.check(schedule, graph), "o_parts|layer=")


@pytest.mark.mpi(ranks=[2])
def test_a_model_that_the_ranks_cannot_split_is_refused(tmp_path, rng, world):
    heads = {"num_attention_heads": world.size + 1, "num_key_value_heads": 1}
    folder = make_model(tmp_path, rng, **heads)
    with pytest.raises(ArgumentError, match="cannot be split over the ranks"):
        load(folder, world=world)


@pytest.mark.mpi(ranks=[2])
def test_a_file_that_one_rank_cannot_read_is_refused_on_all(tmp_path, rng, world):
    folder = split_model(tmp_path, rng, 12)
    if world.rank == world.size - 1:
        (folder / "model.safetensors").unlink()
    with pytest.raises(ArgumentError, match="the model cannot be loaded"):
        load(folder, world=world, **OPTIONS)


@pytest.mark.mpi(ranks=[2])
@pytest.mark.parametrize(
    ("option", "values"),
    [("deterministic", ("run", "batch")), ("batch", (1, 2)), ("page_size", (16, 32))],
)
def test_options_that_differ_between_ranks_are_refused_on_all(
    option, values, tmp_path, rng, world
):
    folder = split_model(tmp_path, rng, 12)
    options = OPTIONS | {option: values[world.rank == 1]}
    with pytest.raises(ArgumentError, match="do not make the same call") as caught:
        load(folder, world=world, **options)
    assert all(f"{option}={value}" in caught.value.got for value in values)


@pytest.mark.mpi(ranks=[2])
def test_a_field_of_the_model_that_differs_is_refused_on_all(tmp_path, rng, world):
    """Neither the program nor any shape depends on it."""
    base = 1e4 if world.rank == 1 else 2e4
    folder = split_model(tmp_path, rng, 12, rope_theta=base)
    with pytest.raises(ArgumentError, match="do not make the same call") as caught:
        load(folder, world=world, **OPTIONS)
    assert "rope_base=10000.0" in caught.value.got


@pytest.mark.mpi(ranks=[2])
def test_rows_that_differ_between_ranks_are_refused_on_all(tmp_path, rng, world):
    with load(split_model(tmp_path, rng, 12), world=world, **OPTIONS) as model:
        with pytest.raises(ArgumentError, match=r"ids \[1\]"):
            model.step([world.rank], [0], [0], TABLE)
        with pytest.raises(ArgumentError, match=r"ids\[0\] = 576"):
            model.step([576 if world.rank == 1 else 3], [0], [0], TABLE)
        with pytest.raises(ArgumentError, match="position 0 was never written"):
            model.step([3], [0], [4 if world.rank == 1 else 0], TABLE)
        first = model.step([3], [0], [0], TABLE)
        np.testing.assert_array_equal(model.step([3], [0], [0], TABLE), first)


@pytest.mark.mpi
@pytest.mark.parametrize("pages", [10**8, 10**12])
def test_a_cache_beyond_the_memory_is_refused_before_weights_are_read(
    pages, tmp_path, rng, world, monkeypatch
):
    folder = make_model(tmp_path, rng, intermediate_size=144, vocab_size=528)
    monkeypatch.setattr("etc_dist.models.loading.load_weights", pytest.fail)
    with pytest.raises(ArgumentError, match="does not fit in the mem|out of range"):
        load(folder, pages=pages, world=world, **OPTIONS)


@pytest.mark.mpi
@pytest.mark.parametrize("where", ["free_bytes", "_allocate"])
def test_a_lack_of_memory_on_one_rank_is_an_error_of_all(
    where, tmp_path, rng, world, monkeypatch
):
    def exhausted(*_: object) -> None:
        raise MemoryError

    folder = make_model(tmp_path, rng, intermediate_size=144, vocab_size=528)
    with monkeypatch.context() as patch:
        if world.rank == world.size - 1:
            if where == "free_bytes":
                patch.setattr(world, "free_bytes", lambda: 1000)
            else:
                patch.setattr("etc_dist.models.model.RowArrays", exhausted)
        with pytest.raises(ArgumentError, match="does not fit in the memory"):
            load(folder, world=world, **OPTIONS)
    load(folder, world=world, **OPTIONS).close()
