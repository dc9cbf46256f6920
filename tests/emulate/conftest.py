"""More orders of events with --all."""

from __future__ import annotations

import pytest

from tests.emulate.cases import SEEDS


@pytest.fixture(scope="session", autouse=True)
def more_seeds(pytestconfig: pytest.Config) -> None:
    if pytestconfig.getoption("--all"):
        SEEDS.append(2)
