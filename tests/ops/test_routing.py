"""The steps of routing, one by one, on small literal numbers."""

from __future__ import annotations

from typing import Any

import numpy as np

from etc_dist.ops.routing import (
    Routing,
    choose_experts,
    combine_rows,
    list_rows,
    locate_rows,
    plan_tiles,
    score_experts,
)

ROUTING = Routing(8, 2, True, "float32", block=4, tile_rows=4)
# Six tokens in two blocks: bit i of a word is token i of the block.
CHOSEN = np.zeros((8, 2), np.int32)
CHOSEN[1] = 0b1101, 0b11  # tokens 0, 2, 3, 4, 5: two tiles of 3 and 2 rows
CHOSEN[6] = 0b0001, 0b10  # tokens 0, 5
IDS = np.array([[6, 1], [3, 4], [1, 3], [1, 4], [1, 3], [6, 1]], np.int32)


def int32(*shape: int) -> Any:
    return np.full(shape, -1, np.int32)


def planned(chosen: Any = CHOSEN) -> dict[str, Any]:
    """What is known of the experts' rows: 32 places in the list of each."""
    arrays = {
        "before": int32(8, 2),
        "tokens": int32(8, 32),
        "counts": int32(8),
        "expert_row": int32(8),
        "tile_expert": int32(7),
        "tile_row": int32(7),
        "tile_rows": int32(7),
        "tile_first": int32(7),
    }
    before, tokens, counts, *tiles = arrays.values()
    for e, words in enumerate(chosen):
        list_rows(ROUTING).body(words, before[e], tokens[e], counts[e, ...])
    plan_tiles(ROUTING).body(counts, tokens[0], *tiles)
    return arrays


def choices(logits: Any, routing: Routing) -> list[Any]:
    """ids, weights, chosen."""
    n, k = len(logits), routing.top_k
    arrays = [int32(n, k), np.empty((n, k), np.float32), int32(8)]
    choose_experts(routing).body(logits, *arrays)
    return arrays


def test_logits_are_products_of_tokens_and_experts():
    x, router = np.array([[1, 2], [0, -1]]), np.array([[3, 1], [0, 2], [1, 0]])
    logits = np.empty((2, 3), np.float32)
    score_experts(ROUTING).body(x, router, logits)
    assert logits.tolist() == [[5, 4, 1], [-1, -2, 0]]


def test_larger_logits_and_smaller_experts_come_first():
    logits = np.array([[0, 3, 1, 3, 0, 0, 0, 2], [5, 5, 5, 5, 5, 5, 5, 5]], np.float32)
    ids, weights, chosen = choices(logits, ROUTING)
    assert ids.tolist() == [[1, 3], [0, 1]]
    assert weights.tolist() == [[0.5, 0.5], [0.5, 0.5]]
    assert chosen.tolist() == [2, 3, 0, 1, 0, 0, 0, 0]


def test_weights_are_not_normalised_unless_asked():
    routing = Routing(8, 2, False, "float32")
    _, weights, _ = choices(np.zeros((1, 8), np.float32), routing)
    assert weights.tolist() == [[0.125, 0.125]]


def test_the_last_token_of_a_block_is_the_sign_bit():
    logits = np.zeros((32, 8), np.float32)
    logits[31, 7] = 1
    *_, chosen = choices(logits, Routing(8, 1, True, "float32"))
    assert chosen.tolist() == [2**31 - 1, 0, 0, 0, 0, 0, 0, -(2**31)]


def test_tokens_are_listed_and_counted():
    plan = planned()
    assert plan["before"][[1, 6]].tolist() == [[0, 3], [0, 1]]
    assert plan["counts"].tolist() == [0, 5, 0, 0, 0, 0, 2, 0]
    assert plan["tokens"][1].tolist() == [0, 2, 3, 4, 5] + [-1] * 27
    assert plan["tokens"][6].tolist() == [0, 5] + [-1] * 30


def test_tiles_are_full_but_the_last():
    plan = planned()
    assert plan["tile_expert"].tolist() == [1, 1, 6, 0, 0, 0, 0]
    assert plan["tile_row"].tolist() == [0, 4, 32, 0, 0, 0, 0]
    assert plan["tile_rows"].tolist() == [4, 1, 2, 0, 0, 0, 0]
    assert plan["tile_first"].tolist() == [32, 36, 192, 0, 0, 0, 0]
    assert plan["expert_row"][[1, 6]].tolist() == [0, 32]


def test_rows_are_found_again():
    taken = CHOSEN.copy()
    taken[[3, 4]] = [[0b110, 0b1], [0b1010, 0]]
    plan = planned(taken)
    place = int32(6, 2)
    for block, here in enumerate((slice(0, 4), slice(4, 6))):
        locate_rows(ROUTING).body(
            IDS[here],
            taken[:, block],
            plan["before"][:, block],
            plan["expert_row"],
            place[here],
        )
    # Expert 1 from row 0 on, 3 from 32, 4 from 64, 6 from 96.
    assert place.tolist() == [[96, 0], [32, 64], [1, 33], [2, 65], [3, 34], [97, 4]]


def test_a_product_and_its_sum_are_rounded_once():
    near = 1 + 2.0**-12  # near * near is 1 + 2**-11 + 2**-24, a digit too long
    product = np.array([[near], [-1 - 2.0**-11]], np.float32)
    weights = np.array([[near, 1.0]], np.float32)
    place, y = np.array([[0, 1]], np.int32), np.empty((1, 1), np.float32)
    combine_rows(ROUTING).body(place, weights, product, y)
    assert y.tolist() == [[0.0]]
    combine_rows(ROUTING).body(place[:, ::-1], weights[:, ::-1], product, y)
    assert y.tolist() == [[2.0**-24]]
