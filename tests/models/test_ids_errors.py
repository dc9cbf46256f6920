"""Token ids and options of types without a plain meaning."""

from __future__ import annotations

import numpy as np
import pytest

from etc_dist.errors import ArgumentError
from etc_dist.models.ids import checked_ids, checked_prompt, checked_stop
from etc_dist.models.pages import PageTable
from etc_dist.models.sampling import Sampling

ODD = [
    [1.0],
    [True],
    [np.True_],
    [np.float32(1)],
    [[1]],
    np.array([1.0]),
    np.array([True]),
    np.array([[1]]),
    np.array(1),
    "1",
    None,
]


@pytest.mark.parametrize("ids", ODD, ids=repr)
def test_odd_ids_are_refused(ids):
    for call in (checked_prompt, checked_stop):
        with pytest.raises(TypeError, match=r"expects an? (int|list)"):
            call(ids, 9)
    with pytest.raises(TypeError):
        checked_ids(ids)


@pytest.mark.parametrize("value", [True, np.True_, "1", None, 1j])
def test_odd_numbers_of_a_sampling_are_refused(value):
    for name in ("temperature", "top_k", "top_p", "seed"):
        with pytest.raises(TypeError, match=f"{name} expects an int"):
            Sampling(**{name: value})


@pytest.mark.parametrize("value", [True, 1.0, np.float64(1), "1"])
def test_lengths_of_other_types_are_refused(value):
    pages = PageTable(2, 4, 16, 8)
    with pytest.raises(TypeError, match="length expects an int"):
        pages.add(value)
    assert (pages.free_requests, pages.free_pages) == (2, 8)


@pytest.mark.parametrize("place", range(4))
def test_tables_have_integers_from_1(place):
    for value, kind in ((0, ArgumentError), (True, TypeError), ("2", TypeError)):
        sizes = [2, 4, 16, 8]
        sizes[place] = value
        with pytest.raises(kind, match=r"expects an int|is out of range"):
            PageTable(*sizes)
