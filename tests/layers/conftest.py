"""What the layer tests share: layers on the world's ranks, their inputs and answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from etc_dist import World
from etc_dist.layers.mlp import MLP
from tests.layers.reference import Answer, draw, draw_weights, reference
from tests.ops.arrays import Arrays


@pytest.fixture(scope="session")
def arrays(world: World) -> Arrays:
    return Arrays(world.backend)


class Layer:
    """An MLP on this world's ranks; every rank knows the weights and rows of all."""

    def __init__(
        self,
        world: World,
        arrays: Arrays,
        seed: int,
        hidden: int,
        inner: int,
        dtype: str = "bfloat16",
        **options: Any,
    ):
        self._arrays, self._rank = arrays, world.rank
        self._rngs = [np.random.default_rng([seed, r]) for r in range(world.size)]
        self._shares = [draw_weights(g, hidden, inner, dtype) for g in self._rngs]
        self._hidden, self._dtype = hidden, dtype
        self.weights = [arrays.put(weight) for weight in self._shares[world.rank]]
        self.mlp = MLP(*self.weights, world=world, **options)

    def rows(self, count: int) -> tuple[Any, Any, Answer]:
        """(x, out, answer) of `count` rows a rank, new ones each time."""
        xs = [draw(rng, (count, self._hidden), self._dtype) for rng in self._rngs]
        out = self._arrays.poisoned((count, self._hidden), self._dtype)
        answer = reference(xs, self._shares)[self._rank]
        return self._arrays.put(xs[self._rank]), out, answer


@pytest.fixture
def make(world: World, arrays: Arrays, seed: int) -> Iterator[Callable[..., Layer]]:
    """Makes layers that are closed after the test."""
    made: list[Layer] = []

    def make(*arguments: Any, **options: Any) -> Layer:
        made.append(Layer(world, arrays, seed, *arguments, **options))
        return made[-1]

    yield make
    for layer in made:
        layer.mlp.close()
