"""The first GEMV of one token; CUDA half in `kernels/functions/gate_up_token.cuh`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from etc_dist.functions.activation import SWIGLU, Activation
from etc_dist.functions.routing import Routing
from etc_dist.functions.scaled_weights import E4M3, Scaling, multiply_rows
from etc_dist.ir import DeviceFunction, Extent, Operand
from etc_dist.ir.function import TENSOR


def gate_up_token(
    routing: Routing,
    activation: Activation = SWIGLU,
    scaling: Scaling | None = None,
) -> DeviceFunction:
    """x [1, hidden], logits [1, experts], gate and up [experts, columns, hidden], down
    [experts, rows, inner], the router's biases [experts] -> activations [1, top_k,
    columns], for the experts that the token picks. All are of the routing's dtype, but
    logits and biases, in fp32. Rows of down of half of these experts are prefetched
    into L2 for a later task.

    scaling: gate, up and down are codes, and the scales [experts, any, any] of the
    matrix of which gate and up are rows follow down."""

    def body(
        x: Any,
        logits: Any,
        gate: Any,
        up: Any,
        down: Any,
        *operands: Any,
        first_row: int = 0,
        up_row: int = 0,
    ) -> None:
        *further, active = operands
        scales = further.pop(0) if scaling is not None else None
        ids, _ = routing.router.choose(logits, *further)
        for k, expert in enumerate(ids[0]):
            left, right = (
                multiply_rows(scaling, x, w, scales, expert, start)[0]
                for w, start in ((gate, first_row), (up, up_row))
            )
            active[0, k] = activation.apply(left, right).astype(active.dtype)

    size = routing.experts, "columns", "hidden"
    element = routing.element if scaling is None else E4M3
    weight = Operand(size, element, leading=True)
    prefetched = replace(weight, size=(routing.experts, None, Extent(whole=True)))
    tile = [
        Operand((1, "hidden"), routing.element),
        Operand((1, routing.experts), "float32"),
        weight,
        weight,
        prefetched,
        *([] if scaling is None else [scaling.operand_of(routing.experts)]),
        *routing.router.operands(routing.experts),
        Operand((1, routing.top_k, "columns"), routing.element),
    ]
    return routing.function(
        "gate_up_token",
        TENSOR,
        len(tile) - 1,
        1,
        body,
        reads_before_wait=(0, 2, 3, 4, *([] if scaling is None else [5])),
        tile=dict(enumerate(tile)),
        constants={
            **routing.choice_constants(),
            **activation.constants(),
            **({} if scaling is None else scaling.constants),
        },
        starts={} if scaling is None else {"first_row": (2, 1), "up_row": (3, 1)},
    )
