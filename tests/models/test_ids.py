"""Token ids and options of NumPy's and torch's types."""

from __future__ import annotations

from dataclasses import astuple
from fractions import Fraction

import numpy as np
import pytest

from etc_dist.models.config import read_config
from etc_dist.models.ids import checked_ids, checked_prompt, checked_stop
from etc_dist.models.sampling import Sampling
from etc_dist.models.setup import ModelSetup
from tests.models.small import make_model

GIVEN = [
    [3, 4],
    (3, 4),
    [np.uint8(3), np.int64(4)],
    np.array([3, 4], np.uint8),
    np.array([3, 4], np.uint64),
    np.array([3, 4], object),
]


@pytest.mark.parametrize("stop_ids", GIVEN, ids=repr)
def test_ids_are_integers_of_python(stop_ids):
    ends = sorted(checked_stop(stop_ids, 9))
    for ids in (checked_prompt(stop_ids, 9), checked_ids(stop_ids), ends):
        assert ids == [3, 4] and {*map(type, ids)} == {int}


@pytest.mark.torch
def test_ids_may_be_in_tensors():
    from torch import int32, tensor

    for ids in (tensor([3, 4]), tensor([3, 4], dtype=int32), list(tensor([3, 4]))):
        assert checked_prompt(ids, 9) == checked_ids(ids) == [3, 4]
        assert checked_stop(ids, 9) == {3, 4}


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64, Fraction])
def test_a_sampling_has_numbers_of_python(kind):
    half = Sampling(kind(0.5), np.uint8(5), kind(0.5), np.uint8(7))
    assert half == Sampling(0.5, 5, 0.5, 7)
    assert [*map(type, astuple(half))] == [float, int, float, int]
    assert half.numbers == Sampling(0.5, 5, 0.5, 7).numbers
    assert Sampling(np.float32(0.01)).temperature == np.float32(0.01)


@pytest.mark.parametrize("kind", [np.uint8, np.int8, np.array])
def test_options_of_a_model_may_be_numbers_of_numpy(kind, tmp_path, rng):
    config = read_config(make_model(tmp_path, rng))
    options = {"batch": 20, "positions": 48, "page_size": 16, "pages": 60}
    setup = ModelSetup(config, **{name: kind(n) for name, n in options.items()})
    setup.check()
    assert setup == ModelSetup(config, **options)
    assert setup.parameters() == ModelSetup(config, **options).parameters()
    assert type(setup.all_pages) is type(setup.most_pages) is int
