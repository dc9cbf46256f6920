"""The tokens of each expert, from given choices; CUDA half in
`kernels/functions/mark_experts.cuh`."""

from __future__ import annotations

from typing import Any

import numpy as np

from etc_dist.functions.routing import BLOCK, NONE, Routing
from etc_dist.ir import DeviceFunction, Extent, Operand
from etc_dist.ir.function import TENSOR


def mark_experts(routing: Routing) -> DeviceFunction:
    """ids [32, top_k] of a block of tokens -> token_bits [experts], of which bit i is
    set if token i chose the expert; and wrong [1]: an id that is neither an expert nor
    NONE, or 0. All int32."""

    def body(ids: Any, token_bits: Any, wrong: Any) -> None:
        unsigned = ids.astype(np.uint32)
        is_expert = unsigned < routing.experts
        words = np.zeros(routing.experts, np.uint32)
        tokens = np.broadcast_to(
            np.arange(len(ids), dtype=np.uint32)[:, None], ids.shape
        )
        np.bitwise_or.at(words, ids[is_expert], np.uint32(1) << tokens[is_expert])
        token_bits[...] = words.view(np.int32)
        worst = unsigned[~is_expert & (ids != NONE)].max(initial=0)
        wrong[...] = worst.astype(np.int32)

    rows = Extent(BLOCK, name="rows", clipped=True)
    tile = {
        0: Operand((rows, routing.top_k), "int32"),
        1: Operand((routing.experts, 1), "int32"),
        2: Operand((1,), "int32", leading=True),
    }
    return routing.function("mark_experts", TENSOR, 1, 2, body, tile=tile)
