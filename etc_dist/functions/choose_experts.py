"""The choices of a block of tokens; CUDA half in
`kernels/functions/choose_experts.cuh`."""

from __future__ import annotations

from typing import Any

import numpy as np

from etc_dist.functions.best_experts import best_experts
from etc_dist.functions.routing import BLOCK, Routing
from etc_dist.ir import DeviceFunction, Extent, Operand
from etc_dist.ir.function import TENSOR


def choose_experts(routing: Routing) -> DeviceFunction:
    """logits [32, experts] (fp32) -> ids [32, top_k] (int32) and weights [32, top_k]
    (fp32), as `best_experts` gives them; chosen [experts] (int32), of which bit i is
    set if token i chose the expert."""

    def body(logits: Any, ids: Any, weights: Any, chosen: Any) -> None:
        ids[...], weights[...] = best_experts(logits, routing.top_k, routing.normalize)
        bits = np.zeros(logits.shape, np.uint32)
        np.put_along_axis(bits, ids, np.uint32(1), axis=1)
        token = np.arange(len(bits), dtype=np.uint32)
        words = np.bitwise_or.reduce(bits << token[:, None], axis=0)
        chosen[...] = words.view(np.int32)

    rows = Extent(BLOCK, name="rows", clipped=True)
    tile = {
        0: Operand((rows, routing.experts), "float32"),
        1: Operand((rows, routing.top_k), "int32"),
        2: Operand((rows, routing.top_k), "float32"),
        3: Operand((routing.experts, 1), "int32"),
    }
    return routing.function("choose_experts", TENSOR, 1, 3, body, tile=tile)
