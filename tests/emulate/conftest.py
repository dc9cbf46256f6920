"""The folder of compiled programs, shared by all test processes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.emulate.cases import SEEDS


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.getbasetemp()
    found = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "emulated"
    found.mkdir(exist_ok=True)
    return found


@pytest.fixture(scope="session", autouse=True)
def more_seeds(pytestconfig: pytest.Config) -> None:
    if pytestconfig.getoption("--all"):
        SEEDS.append(2)
