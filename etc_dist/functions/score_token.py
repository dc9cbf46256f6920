"""Router logits of one token; CUDA half in `kernels/functions/score_token.cuh`."""

from __future__ import annotations

from typing import Any

import numpy as np

from etc_dist.functions.routing import Routing
from etc_dist.ir import DeviceFunction, Operand
from etc_dist.ir.function import TENSOR


def score_token(routing: Routing) -> DeviceFunction:
    """x [1, hidden], router [experts, hidden] of some experts -> logits [1, experts] in
    fp32."""

    def body(x: Any, router: Any, logits: Any) -> None:
        logits[...] = x.astype(np.float32) @ router.astype(np.float32).T

    tile = {
        0: Operand((1, "hidden"), routing.element),
        1: Operand(("scored", "hidden"), routing.element),
        2: Operand((1, "scored"), "float32"),
    }
    return routing.function("score_token", TENSOR, 2, 1, body, tile=tile)
