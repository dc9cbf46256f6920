"""Layers on the world's ranks, with their inputs and answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from etc_dist import World
from etc_dist.layers.mlp import MLP
from etc_dist.layers.moe import PACKED_INNER, MoE
from etc_dist.layers.moe_few_tokens import FEW_TOKENS
from etc_dist.ops.few_rows import MOST_ROWS
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


class DenseRows:
    """An MLP on this world's ranks; every rank draws the weights and rows of all.
    most_gathered: the rows of all ranks up to which several ranks gather them first."""

    def __init__(
        self,
        world: World,
        arrays: Arrays,
        seed: int,
        hidden: int,
        inner: int,
        dtype: str = "bfloat16",
        most_gathered: int = MOST_ROWS,
        **options: Any,
    ):
        self._arrays, self._rank = arrays, world.rank
        self._rngs = [np.random.default_rng([seed, r]) for r in range(world.size)]
        self._shares = [draw_weights(g, hidden, inner, dtype) for g in self._rngs]
        self._hidden, self.dtype = hidden, dtype
        self.weights = [arrays.put(weight) for weight in self._shares[world.rank]]
        kind = type("MLP", (MLP,), {"most_gathered": most_gathered})
        self.layer: Any = kind(*self.weights, world=world, **options)

    def rows(self, count: int) -> tuple[Any, Any, Answer]:
        """(x, out, answer) of `count` rows a rank, new ones each time."""
        xs = [draw(rng, (count, self._hidden), self.dtype) for rng in self._rngs]
        out = self._arrays.poisoned((count, self._hidden), self.dtype)
        answer = reference(xs, self._shares)[self._rank]
        return self._arrays.put(xs[self._rank]), out, answer

    def check(self, count: int, ids: Any = None) -> None:
        """One call on new rows, and its result."""
        x, out, answer = self.rows(count, ids) if ids is not None else self.rows(count)
        assert self.layer(x, out) is out
        self.layer.synchronize()
        answer.check(self._arrays.get(out), self.dtype)

    def check_turns(self, counts: Sequence[int]) -> list[str]:
        """Calls one after the other, without synchronising in between, and their
        results. Returns the graphs that made them."""
        calls, names = [self.rows(count) for count in counts], []
        for x, out, _ in calls:
            self.layer(x, out)
            names.append(self.program)
        self.layer.synchronize()
        for _, out, answer in calls:
            answer.check(self._arrays.get(out), self.dtype)
        return names

    @property
    def program(self) -> str:
        """The name of the graph that made the last call."""
        return str(self.layer.program.plan.graph.name)


class ExpertRows(DenseRows):
    """A mixture of experts on this world's ranks; every rank draws the weights and
    tokens of all. By default, few tokens use the program for many. packed_inner: the
    inner width from which on rows are copied to their tiles."""

    def __init__(
        self,
        world: World,
        arrays: Arrays,
        seed: int,
        hidden: int,
        inner: int,
        *,
        experts: int = 8,
        top_k: int = 2,
        dtype: str = "bfloat16",
        parallel: str = "tensor",
        few_tokens: int = 0,
        packed_inner: int = PACKED_INNER,
        **options: Any,
    ):
        self._arrays, self._rng = arrays, np.random.default_rng(seed)
        self._hidden, self.dtype = hidden, dtype
        self._host = draw_experts(self._rng, experts, hidden, inner, dtype)
        self._rank, self._ranks = world.rank, world.size
        self._is_shared = parallel == "tensor"  # all ranks get all tokens
        share = own_experts(self._host, parallel, world.rank, world.size)
        self.weights = [arrays.put(weight.copy()) for weight in share]
        options |= {"parallel": parallel, "world": world, "few_tokens": few_tokens}
        layer = type("MoE", (MoE,), {"packed_inner": packed_inner})
        self.layer = layer(*self.weights, top_k=top_k, **options)

    def rows(self, count: int, ids: Any = None) -> tuple[Any, Any, Answer]:
        """(x, out, answer) of `count` tokens a rank, new ones each time; all ranks'
        choose the experts `ids` [ranks * count, top_k] where these are given."""
        x = draw(self._rng, (self._ranks * count, self._hidden), self.dtype)
        if ids is not None:
            aim(x, self._host, ids)
            self.weights[0][...] = self._arrays.put(self._host[0])
        out = self._arrays.poisoned((count, self._hidden), self.dtype)
        rank_rows = np.split(x, self._ranks)[self._rank]
        answer = moe_reference(rank_rows, self._host, self.layer.mixture.router)
        return self._arrays.put(x if self._is_shared else rank_rows), out, answer


KINDS: dict[str, tuple[type[DenseRows], dict[str, Any], str, int]] = {
    "mlp": (DenseRows, {}, "mlp_tiles_graph", 2),
    "mlp many rows": (DenseRows, {"most_gathered": 0}, "mlp_graph", 2),
    "moe": (ExpertRows, {}, "moe_graph", 1),
    "moe few tokens": (
        ExpertRows,
        {"few_tokens": FEW_TOKENS},
        "moe_few_tokens_graph",
        1,
    ),
    "moe tensor-parallel": (ExpertRows, {}, "moe_graph", 2),
    "moe expert-parallel": (ExpertRows, {"parallel": "expert"}, "moe_graph", 2),
    "moe packed": (
        ExpertRows,
        {"parallel": "expert", "packed_inner": 1},
        "moe_graph",
        2,
    ),
}
"""By name: the class, its options, the program, and the ranks of its tests."""
