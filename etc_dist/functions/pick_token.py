"""The best experts of one token; CUDA half in `kernels/functions/pick_token.cuh`."""

from __future__ import annotations

from typing import Any

from etc_dist.functions.best_experts import best_experts
from etc_dist.functions.routing import Routing
from etc_dist.ir import DeviceFunction, Operand
from etc_dist.ir.function import TENSOR


def pick_token(routing: Routing) -> DeviceFunction:
    """logits [1, experts] -> ids [1, top_k] (int32), weights [1, top_k] (fp32), see
    `best_experts`."""

    def body(logits: Any, ids: Any, weights: Any) -> None:
        ids[...], weights[...] = best_experts(logits, routing.top_k, routing.normalize)

    tile = {
        0: Operand((1, routing.experts), "float32"),
        1: Operand((1, routing.top_k), "int32"),
        2: Operand((1, routing.top_k), "float32"),
    }
    return routing.function("pick_token", TENSOR, 1, 2, body, tile=tile)
