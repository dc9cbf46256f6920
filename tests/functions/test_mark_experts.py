"""The tokens of each expert, from given choices: both bodies."""

from __future__ import annotations

import numpy as np
import pytest

from etc_dist.functions.mark_experts import mark_experts
from etc_dist.functions.router import Router
from etc_dist.functions.routing import Routing
from tests.functions.both import both
from tests.graphs.calls import one_call

ROUTING = Routing(24, Router(4, False), "bfloat16", has_none=True)


MARKED = one_call(
    1,
    mark_experts(ROUTING),
    reads=["ids tokens/32 4 int32"],
    writes=["chosen 24 tokens//32 int32", "wrong tokens//32 int32"],
)


def test_bits_are_those_of_the_tokens_that_chose_an_expert(rng, kernels):
    ids = np.stack([rng.permutation(24)[:4] for _ in range(128)])
    ids[rng.random(ids.shape) < 0.3] = -1
    ids[40:64] = -1
    bits = np.zeros((24, 4, 32), np.int64)
    for token_idx, row in enumerate(ids):
        bits[row[row >= 0], token_idx // 32, token_idx % 32] = 1
    words = (bits << np.arange(32)).sum(axis=2).astype(np.uint32).view(np.int32)
    arrays, dims = {"ids": ids.astype(np.int32)}, {"tokens": 128}
    for outputs in both(MARKED, arrays, dims, kernels):
        np.testing.assert_array_equal(outputs["chosen"], words)
        assert outputs["wrong"].tolist() == [0] * 4


@pytest.mark.parametrize("wrong", [24, 2**31 - 1, -2, -(2**31)])
def test_an_id_that_is_not_an_expert_is_reported(wrong, kernels):
    ids = np.tile([[3, 5, 8, 23]], (128, 1))
    ids[70, 2] = wrong
    arrays, dims = {"ids": ids.astype(np.int32)}, {"tokens": 128}
    for outputs in both(MARKED, arrays, dims, kernels):
        assert outputs["wrong"].tolist() == [0, 0, wrong, 0]
        assert outputs["chosen"][:, 2].astype(np.uint32).tolist() == [
            {3: 2**32 - 1, 5: 2**32 - 1, 8: 2**32 - 1 - 64, 23: 2**32 - 1}.get(e, 0)
            for e in range(24)
        ]
