"""Worlds on which no model is loaded."""

from __future__ import annotations

import pytest

from etc_dist.errors import ArgumentError
from etc_dist.models import load
from tests.models.small import make_model


@pytest.mark.mpi(min_size=2)
def test_more_than_one_rank_is_refused(tmp_path, rng, world):
    folder = make_model(tmp_path, rng)
    with pytest.raises(ArgumentError, match=f"got:    {world.size} ranks"):
        load(folder, world=world)
