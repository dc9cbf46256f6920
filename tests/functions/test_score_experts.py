"""Logits of a block of tokens."""

from __future__ import annotations

import numpy as np

from etc_dist.emulate import Emulator
from etc_dist.functions.router import Router
from etc_dist.functions.routing import Routing
from etc_dist.functions.score_experts import score_experts
from tests.functions.both import both
from tests.functions.compiled import check_compiled
from tests.graphs.calls import one_call
from tests.layers.reference import draw

ROUTING = Routing(8, Router(2), "float32")


def test_logits_are_products_of_tokens_and_experts():
    x, router = np.array([[1, 2], [0, -1]]), np.array([[3, 1], [0, 2], [1, 0]])
    logits = np.empty((2, 3), np.float32)
    score_experts(ROUTING).body(x, router, logits)
    assert logits.tolist() == [[5, 4, 1], [-1, -2, 0]]


def test_few_tokens_have_the_bits_of_many(rng):
    """Of up to eight, there is code with fewer instructions. Columns of several
    rounds of loads, of which the last is not whole."""
    graph = one_call(
        1,
        score_experts(Routing(12, Router(2), "float16"), 8),
        ["x tokens/32 hidden float16", "router experts/8 hidden float16"],
        ["logits tokens/32 experts/8 float32"],
    )
    program, dims = Emulator(graph, workers=2), {"hidden": 2112, "experts": 12}
    arrays = {
        "x": draw(rng, (13, 2112), "float16"),
        "router": draw(rng, (12, 2112), "float16"),
    }
    _, many = both(program, arrays, dims | {"tokens": 13})
    few = arrays | {"x": arrays["x"][:5]}
    expected, outputs = both(program, few, dims | {"tokens": 5})
    np.testing.assert_array_equal(outputs["logits"], many["logits"][:5])
    np.testing.assert_allclose(outputs["logits"], expected["logits"], atol=1e-3)
    check_compiled(graph)
