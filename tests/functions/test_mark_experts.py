"""The tokens of each expert, from given choices: both bodies."""

from __future__ import annotations

import numpy as np
import pytest

from etc_dist.emulate import Emulator
from etc_dist.functions.mark_experts import mark_experts
from etc_dist.functions.router import Router
from etc_dist.functions.routing import Routing
from etc_dist.ir import Graph, ceildiv, graph_function, span, tile
from etc_dist.runtime.cpu import simulate
from etc_dist.schedule import schedule_static

ROUTING = Routing(24, Router(4, False), "bfloat16", has_none=True)


@graph_function
def marked(g: Graph) -> None:
    tokens = g.dims("tokens")
    blocks = g.let("blocks", ceildiv(tokens, 32))
    ids = g.input("ids", (tokens, 4), "int32")
    chosen = g.output("chosen", (24, blocks), "int32")
    wrong = g.output("wrong", (blocks,), "int32")
    (b,) = grid = g.grid(b=blocks)
    g.call(
        mark_experts(ROUTING),
        grid,
        reads=[ids[tile(b, 32), :]],
        writes=[chosen[:, b], wrong[span(b, 1)]],
    )


def both(ids):
    """chosen and wrong of both bodies."""
    given, dims = {"ids": ids.astype(np.int32)}, {"tokens": len(ids)}
    yield simulate(schedule_static(marked(1)), [given], dims).outputs[0]
    yield Emulator(marked(1), workers=2).run([given], dims)[0]


def test_bits_are_those_of_the_tokens_that_chose_an_expert(rng):
    ids = np.stack([rng.permutation(24)[:4] for _ in range(128)])
    ids[rng.random(ids.shape) < 0.3] = -1
    ids[40:64] = -1
    wanted = np.zeros((24, 4, 32), np.int64)
    for token, row in enumerate(ids):
        wanted[row[row >= 0], token // 32, token % 32] = 1
    words = (wanted << np.arange(32)).sum(axis=2).astype(np.uint32).view(np.int32)
    for outputs in both(ids):
        np.testing.assert_array_equal(outputs["chosen"], words)
        assert outputs["wrong"].tolist() == [0] * 4


@pytest.mark.parametrize("wrong", [24, 2**31 - 1, -2, -(2**31)])
def test_an_id_that_is_not_an_expert_is_reported(wrong):
    ids = np.tile([[3, 5, 8, 23]], (128, 1))
    ids[70, 2] = wrong
    for outputs in both(ids):
        assert outputs["wrong"].tolist() == [0, 0, wrong, 0]
        assert outputs["chosen"][:, 2].astype(np.uint32).tolist() == [
            {3: 2**32 - 1, 5: 2**32 - 1, 8: 2**32 - 1 - 64, 23: 2**32 - 1}.get(e, 0)
            for e in range(24)
        ]
