"""Fixtures of the tests of the launcher."""

import pytest


@pytest.fixture(autouse=True)
def jobs_with_default_signals(default_signals):
    """For all tests here."""
