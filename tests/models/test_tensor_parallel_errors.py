"""Models that ranks cannot split, and calls that differ between ranks."""

from __future__ import annotations

import numpy as np
import pytest

from etc_dist.errors import ArgumentError
from etc_dist.models import load
from etc_dist.models.config import read_config
from etc_dist.models.part import check_ranks
from tests.models.small import make_model
from tests.models.test_tensor_parallel import PAGE, POSITIONS, split_model

OPTIONS = {"batch": 1, "positions": POSITIONS, "page_size": PAGE}
TABLE = np.arange(2)[None]


@pytest.mark.parametrize(
    ("ranks", "changes", "text"),
    [
        (3, {"num_attention_heads": 8}, "8 heads, a multiple of the ranks"),
        (3, {"num_key_value_heads": 2}, "2 heads of the cache, a multiple or a div"),
        (4, {"intermediate_size": 200}, "inner width 200, a multiple of 8 on each"),
        (2, {"vocab_size": 520}, "vocabulary 520, a multiple of 8 on each rank"),
    ],
)
def test_sizes_that_ranks_cannot_split_are_named(ranks, changes, text, tmp_path, rng):
    sizes = {"num_attention_heads": 12, "intermediate_size": 192, "vocab_size": 576}
    config = read_config(make_model(tmp_path, rng, **(sizes | changes)))
    with pytest.raises(ArgumentError, match=text):
        check_ranks(config, ranks)
    check_ranks(config, 1)


@pytest.mark.mpi(min_size=2, max_size=4)
def test_a_model_that_the_ranks_cannot_split_is_refused(tmp_path, rng, world):
    heads = {"num_attention_heads": world.size + 1, "num_key_value_heads": 1}
    folder = make_model(tmp_path, rng, **heads)
    with pytest.raises(ArgumentError, match="cannot be split over the ranks"):
        load(folder, world=world)


@pytest.mark.mpi(min_size=2, max_size=4)
def test_a_file_that_one_rank_cannot_read_is_refused_on_all(tmp_path, rng, world):
    folder = split_model(tmp_path, rng, 12)
    if world.rank == world.size - 1:
        (folder / "model.safetensors").unlink()
    with pytest.raises(ArgumentError, match="the model cannot be loaded"):
        load(folder, world=world, **OPTIONS)


@pytest.mark.mpi(min_size=2, max_size=4)
def test_rows_that_differ_between_ranks_are_refused_on_all(tmp_path, rng, world):
    with load(split_model(tmp_path, rng, 12), world=world, **OPTIONS) as model:
        with pytest.raises(ArgumentError, match=r"ids \[1\]"):
            model.step([world.rank], [0], [0], TABLE)
        with pytest.raises(ArgumentError, match="ids: 576"):
            model.step([576 if world.rank == 1 else 3], [0], [0], TABLE)
        first = model.step([3], [0], [0], TABLE)
        np.testing.assert_array_equal(model.step([3], [0], [0], TABLE), first)
