"""Makes layers of each kind for a test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from etc_dist import World
from tests.layers.kinds import KINDS, DenseRows
from tests.ops.arrays import Arrays


@pytest.fixture(scope="session")
def arrays(world: World) -> Arrays:
    return Arrays(world.backend)


@pytest.fixture
def zeros(arrays: Arrays) -> Callable[..., Any]:
    return lambda *shape, dtype="bfloat16": arrays.put_as(np.zeros(shape), dtype)


@pytest.fixture
def make(world: World, arrays: Arrays, seed: int) -> Iterator[Callable[..., Any]]:
    """Makes layers of a kind, which are closed after the test."""
    layers: list[DenseRows] = []

    def make(kind: str, hidden: int, inner: int, **options: Any) -> DenseRows:
        rows, defaults, _, ranks = KINDS[kind]
        if world.size > ranks == 1:
            pytest.skip(f"{kind}: for one rank")
        layers.append(rows(world, arrays, seed, hidden, inner, **(defaults | options)))
        return layers[-1]

    yield make
    for rows in layers:
        rows.layer.close()
