"""The choices of a block of tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from etc_dist.emulate import Emulator
from etc_dist.functions.choose_experts import choose_experts
from etc_dist.functions.router import Router
from etc_dist.functions.routing import Routing
from etc_dist.ir import GraphFunction
from tests.functions.both import both_on_ranks
from tests.graphs.calls import one_call

ROUTING = Routing(8, Router(2), "float32")


def choices(logits: Any, routing: Routing) -> list[Any]:
    """ids, weights, chosen."""
    num_tokens, k = len(logits), routing.top_k
    arrays = [
        np.empty((num_tokens, k), np.int32),
        np.empty((num_tokens, k), np.float32),
        np.empty(8, np.int32),
    ]
    choose_experts(routing, marks=True).body(logits, *arrays)
    return arrays


def test_larger_logits_and_smaller_experts_come_first():
    logits = np.array([[0, 3, 1, 3, 0, 0, 0, 2], [5, 5, 5, 5, 5, 5, 5, 5]], np.float32)
    ids, weights, words = choices(logits, ROUTING)
    assert ids.tolist() == [[1, 3], [0, 1]]
    assert weights.tolist() == [[0.5, 0.5], [0.5, 0.5]]
    assert words.tolist() == [2, 3, 0, 1, 0, 0, 0, 0]


def test_weights_are_not_normalised_by_default():
    routing = Routing(8, Router(2, False), "float32")
    _, weights, _ = choices(np.zeros((1, 8), np.float32), routing)
    assert weights.tolist() == [[0.125, 0.125]]


def test_the_last_token_of_a_block_is_the_sign_bit():
    logits = np.zeros((32, 8), np.float32)
    logits[31, 7] = 1
    *_, words = choices(logits, Routing(8, Router(1), "float32"))
    assert words.tolist() == [2**31 - 1, 0, 0, 0, 0, 0, 0, -(2**31)]


def test_a_row_of_no_request_has_no_experts():
    logits = np.array([[0, 2, 2, 1, 0, 0, 0, 0]] * 2, np.float32)
    ids, weights = np.full((2, 2), 9, np.int32), np.ones((2, 2), np.float32)
    position = np.array([-1, 0], np.int32)
    function = choose_experts(ROUTING, has_position=True)
    function.body(logits, position, ids, weights)
    assert ids.tolist() == [[-1, -1], [1, 2]]
    assert weights.tolist() == [[0, 0], [0.5, 0.5]]


def chosen_of_own_rows(has_count: bool) -> GraphFunction:
    routing, block = Routing(8, Router(4), "float32"), "[tile(b, 32)]"
    # As many places as `most`, which no output may have.
    parts = """
        own_rows rows most
        output chosen [8, ceildiv(places, 32)] int32
    """
    count = ["count 1 int32", "logits[span(0, b * 32), span(0, 1)]"]
    return one_call(
        2,
        choose_experts(routing, marks=True, fills=True, has_count=has_count),
        [f"logits rows{block} 8[:8] float32", *(count if has_count else [])],
        [f"ids places{block} 4 int32", f"weights places{block} 4 float32",
         "chosen[:, b]"],
        dims="places",
        parts=parts,
        grid="b: ceildiv(most, 32)",
    )  # fmt: skip


@pytest.mark.parametrize("has_count", [False, True])
def test_rows_that_are_no_tokens_get_no_experts(has_count, rng):
    """Those that a rank does not have, and those from its count on."""
    falling = np.arange(8, dtype=np.float32)
    logits = rng.permuted(np.tile(falling, (35, 1)), axis=1)
    emulator = Emulator(chosen_of_own_rows(has_count), workers=2)
    counted_cases = [(34, 33), (35, 7), (35, -1)] if has_count else []
    for rows, fewer in [(0, 0), (33, 33), *counted_cases]:
        inputs = [{"logits": logits[:count]} for count in (rows, 35)]
        for arrays, count in zip(
            inputs, (fewer, 99) if has_count else (), strict=False
        ):
            arrays["count"] = np.array([count], np.int32)
        dims = {"most": 35, "places": 35}
        fewer = max(fewer, 0)
        for part, whole in both_on_ranks(emulator, inputs, dims, check=False):
            for name, none in (("ids", -1), ("weights", 0)):
                assert (part[name][:fewer] == whole[name][:fewer]).all()
                assert (part[name][fewer:] == none).all()
            bits = np.bitwise_count(part["chosen"].view(np.uint32))
            assert bits.sum() == 4 * fewer and (whole["ids"] >= 0).all()
