"""Fixtures of the tests of the verifier."""

import pytest

from etc_dist.verify import cells


@pytest.fixture(autouse=True)
def few_cells_are_reduced(monkeypatch):
    """Small programs are checked as larger ones are."""
    monkeypatch.setattr(cells, "FEW_CELLS", 0)
