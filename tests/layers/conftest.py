"""What the layer tests share: layers on the world's ranks, their inputs and answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from etc_dist import World
from etc_dist.layers.mlp import MLP
from etc_dist.layers.moe import MoE
from tests.layers.reference import (
    Answer,
    aim,
    draw,
    draw_experts,
    draw_weights,
    moe_reference,
    own_experts,
    reference,
)
from tests.ops.arrays import Arrays


@pytest.fixture(scope="session")
def arrays(world: World) -> Arrays:
    return Arrays(world.backend)


class Layer:
    """An MLP on this world's ranks; every rank knows the weights and rows of all. Few
    rows go through the program for many, and no rows are packed, unless few_rows and
    packed say otherwise."""

    def __init__(
        self,
        world: World,
        arrays: Arrays,
        seed: int,
        hidden: int,
        inner: int,
        dtype: str = "bfloat16",
        few_rows: int = 0,
        packed: bool = False,
        **options: Any,
    ):
        self._arrays, self._rank = arrays, world.rank
        self._rngs = [np.random.default_rng([seed, r]) for r in range(world.size)]
        self._shares = [draw_weights(g, hidden, inner, dtype) for g in self._rngs]
        self._hidden, self._dtype = hidden, dtype
        self.weights = [arrays.put(weight) for weight in self._shares[world.rank]]
        options |= {"few_rows": few_rows, "packed": packed}
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


class Experts:
    """A mixture of experts on this world's ranks; every rank knows the weights and
    tokens of all. Few tokens go through the program for many unless few_tokens says
    otherwise."""

    def __init__(
        self,
        world: World,
        arrays: Arrays,
        seed: int,
        experts: int,
        hidden: int,
        inner: int,
        *,
        dtype: str = "bfloat16",
        parallel: str = "tensor",
        few_tokens: int = 0,
        **options: Any,
    ):
        self._arrays, self._rng = arrays, np.random.default_rng(seed)
        self._hidden, self._dtype = hidden, dtype
        self._host = draw_experts(self._rng, experts, hidden, inner, dtype)
        self._rank, self._ranks = world.rank, world.size
        self._shared = parallel == "tensor"  # all ranks get all tokens
        own = own_experts(self._host, parallel, world.rank, world.size)
        self.weights = [arrays.put(weight.copy()) for weight in own]
        options |= {"parallel": parallel, "world": world, "few_tokens": few_tokens}
        self.moe = MoE(*self.weights, **options)

    def rows(self, count: int, ids: Any = None) -> tuple[Any, Any, Answer]:
        """(x, out, answer) of `count` tokens a rank, new ones each time; all ranks'
        choose the experts `ids` [ranks * count, top_k] where these are given."""
        x = draw(self._rng, (self._ranks * count, self._hidden), self._dtype)
        if ids is not None:
            aim(x, self._host, ids)
            self.weights[0][...] = self._arrays.put(self._host[0])
        out = self._arrays.poisoned((count, self._hidden), self._dtype)
        own = np.split(x, self._ranks)[self._rank]
        answer = moe_reference(own, self._host, self.moe.top_k, self.moe.normalize)
        return self._arrays.put(x if self._shared else own), out, answer


@pytest.fixture
def make_moe(
    one_rank: World, arrays: Arrays, seed: int
) -> Iterator[Callable[..., Experts]]:
    """Makes mixtures of experts on one rank that are closed after the test."""
    yield from _make_experts(one_rank, arrays, seed)


@pytest.fixture
def make_parallel(
    world: World, arrays: Arrays, seed: int
) -> Iterator[Callable[..., Experts]]:
    """Makes mixtures of experts on all ranks that are closed after the test."""
    yield from _make_experts(world, arrays, seed)


def _make_experts(
    world: World, arrays: Arrays, seed: int
) -> Iterator[Callable[..., Experts]]:
    made: list[Experts] = []

    def make(*arguments: Any, **options: Any) -> Experts:
        made.append(Experts(world, arrays, seed, *arguments, **options))
        return made[-1]

    yield make
    for layer in made:
        layer.moe.close()
