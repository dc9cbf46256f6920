"""The first GEMV of one token; CUDA half in `kernels/functions/gate_up_token.cuh`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from etc_dist.functions.activation import SWIGLU, Activation
from etc_dist.functions.routing import Routing
from etc_dist.ir import DeviceFunction, Extent, Operand
from etc_dist.ir.function import TENSOR


def gate_up_token(routing: Routing, activation: Activation = SWIGLU) -> DeviceFunction:
    """x [1, hidden], logits [1, experts], gate and up [experts, columns, hidden], down
    [experts, rows, inner], the router's biases [experts] -> activations [1, top_k,
    columns], for the experts that the token picks. All are of the routing's dtype, but
    logits and biases, in fp32. Rows of down of half of these experts are prefetched
    into L2 for a later task."""

    def body(
        x: Any, logits: Any, gate: Any, up: Any, down: Any, *operands: Any
    ) -> None:
        *biases, active = operands
        row = x[0].astype(np.float32)
        ids, _ = routing.router.choose(logits, *biases)
        for k, expert in enumerate(ids[0]):
            left, right = (w[expert].astype(np.float32) @ row for w in (gate, up))
            active[0, k] = activation.apply(left, right).astype(active.dtype)

    size = routing.experts, "columns", "hidden"
    weight = Operand(size, routing.element, leading=True)
    prefetched = replace(weight, size=(routing.experts, None, Extent(whole=True)))
    tile = [
        Operand((1, "hidden"), routing.element),
        Operand((1, routing.experts), "float32"),
        weight,
        weight,
        prefetched,
        *routing.router.operands(routing.experts),
        Operand((1, routing.top_k, "columns"), routing.element),
    ]
    return routing.function(
        "gate_up_token",
        TENSOR,
        len(tile) - 1,
        1,
        body,
        reads_before_wait=(0, 2, 3, 4),
        tile=dict(enumerate(tile)),
        constants={**routing.choice_constants(), **activation.constants()},
    )
