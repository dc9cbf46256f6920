"""The choices of a block of tokens."""

from __future__ import annotations

from typing import Any

import numpy as np

from etc_dist.emulate import Emulator
from etc_dist.functions.choose_experts import choose_experts
from etc_dist.functions.router import Router
from etc_dist.functions.routing import Routing
from etc_dist.ir import Graph, ceildiv, graph_function, span, tile
from etc_dist.runtime.cpu import simulate
from etc_dist.schedule import schedule_static

ROUTING = Routing(8, Router(2), "float32")


def choices(logits: Any, routing: Routing) -> list[Any]:
    """ids, weights, chosen."""
    n, k = len(logits), routing.top_k
    arrays = [
        np.empty((n, k), np.int32),
        np.empty((n, k), np.float32),
        np.empty(8, np.int32),
    ]
    choose_experts(routing, marks=True).body(logits, *arrays)
    return arrays


def test_larger_logits_and_smaller_experts_come_first():
    logits = np.array([[0, 3, 1, 3, 0, 0, 0, 2], [5, 5, 5, 5, 5, 5, 5, 5]], np.float32)
    ids, weights, chosen = choices(logits, ROUTING)
    assert ids.tolist() == [[1, 3], [0, 1]]
    assert weights.tolist() == [[0.5, 0.5], [0.5, 0.5]]
    assert chosen.tolist() == [2, 3, 0, 1, 0, 0, 0, 0]


def test_weights_are_not_normalised_by_default():
    routing = Routing(8, Router(2, False), "float32")
    _, weights, _ = choices(np.zeros((1, 8), np.float32), routing)
    assert weights.tolist() == [[0.125, 0.125]]


def test_the_last_token_of_a_block_is_the_sign_bit():
    logits = np.zeros((32, 8), np.float32)
    logits[31, 7] = 1
    *_, chosen = choices(logits, Routing(8, Router(1), "float32"))
    assert chosen.tolist() == [2**31 - 1, 0, 0, 0, 0, 0, 0, -(2**31)]


def test_a_row_of_no_request_has_no_experts():
    logits = np.array([[0, 2, 2, 1, 0, 0, 0, 0]] * 2, np.float32)
    ids, weights = np.full((2, 2), 9, np.int32), np.ones((2, 2), np.float32)
    position = np.array([-1, 0], np.int32)
    function = choose_experts(ROUTING, has_position=True)
    function.body(logits, position, ids, weights)
    assert ids.tolist() == [[-1, -1], [1, 2]]
    assert weights.tolist() == [[0, 0], [0.5, 0.5]]


@graph_function
def chosen_of_own_rows(g: Graph) -> None:
    rows, most = g.own_rows("rows", "most")
    logits = g.input("logits", (rows, 8), "float32")
    ids, weights = (g.output(t[:3], (most, 4), t) for t in ("int32", "float32"))
    chosen = g.output("chosen", (8, ceildiv(most, 32)), "int32")
    (b,) = grid = g.grid(b=ceildiv(most, 32))
    of_block = tile(b, 32)
    g.call(
        choose_experts(Routing(8, Router(4), "float32"), marks=True, fills=True),
        grid,
        reads=[logits[of_block, span(0, 8)]],
        writes=[ids[of_block, :], weights[of_block, :], chosen[:, b]],
    )


def test_rows_that_a_rank_does_not_have_get_no_experts(rng):
    graph, falling = chosen_of_own_rows(2), np.arange(8, dtype=np.float32)
    logits = rng.permuted(np.tile(falling, (35, 1)), axis=1)
    for fewer in (0, 33):
        inputs = [{"logits": logits[:count]} for count in (fewer, 35)]
        plan, dims = schedule_static(graph), {"most": 35}
        of_numpy = simulate(plan, inputs, dims, check=False).outputs
        of_cuda = Emulator(graph, workers=2).run(inputs)
        for found in (of_numpy, of_cuda):
            whole, part = found[1], found[0]
            for name, none in (("int", -1), ("flo", 0)):
                assert (part[name][:fewer] == whole[name][:fewer]).all()
                assert (part[name][fewer:] == none).all()
            bits = np.bitwise_count(part["chosen"].view(np.uint32))
            assert bits.sum() == 4 * fewer and (whole["int"] >= 0).all()
