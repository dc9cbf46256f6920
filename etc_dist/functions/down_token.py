"""The second GEMV of one token; CUDA half in `kernels/functions/down_token.cuh`."""

from __future__ import annotations

from typing import Any

import numpy as np

from etc_dist.functions.routing import Routing
from etc_dist.functions.scaled_weights import E4M3, Scaling, multiply_rows
from etc_dist.ir import DeviceFunction, Extent, Operand
from etc_dist.ir.function import TENSOR


def down_token(
    routing: Routing, *, adds: bool = False, scaling: Scaling | None = None
) -> DeviceFunction:
    """ids and weights [1, top_k], active [1, top_k, inner], down [experts, columns,
    inner] -> y [1, columns]: the weighted sum over the experts that the token picks, in
    fp32. An id below 0 has the weight 0. Before the activations are complete, the first
    rows of down are loaded, and those of the experts of which `gate_up_token`
    prefetches none are prefetched into L2. adds: further rows [1, columns] are read,
    and added to the sum. scaling: down has codes, and its scales [experts, any, any]
    follow."""

    def body(
        ids: Any,
        weights: Any,
        active: Any,
        down: Any,
        *operands: Any,
        first_row: int = 0,
    ) -> None:
        *addends, y = operands
        scales = addends.pop(0) if scaling is not None else None
        total = np.zeros(y.shape[1], np.float32)
        for k, expert in enumerate(np.maximum(ids[0], 0)):
            rows = active[:, k]
            row = multiply_rows(scaling, rows, down, scales, expert, first_row)[0]
            total += weights[0, k] * row
        for rows in addends:
            total += rows[0].astype(np.float32)
        y[0] = total.astype(y.dtype)

    inner = Extent(name="inner", whole=True)
    # The rows of a weight come in pairs.
    columns = Extent(name="columns", multiple=2, begins=2)
    y = Operand((1, columns), routing.element, leading=True)
    element = routing.element if scaling is None else E4M3
    tile = [
        Operand((1, routing.top_k), "int32", leading=True),
        Operand((1, routing.top_k), "float32"),
        Operand((1, routing.top_k, inner), routing.element),
        Operand((routing.experts, columns, inner), element, leading=True),
        *([] if scaling is None else [scaling.operand_of(routing.experts)]),
        *[y] * (adds + 1),
    ]
    return routing.function(
        "down_token",
        TENSOR,
        len(tile) - 1,
        1,
        body,
        reads_before_wait=(0, 1, 3, *([] if scaling is None else [4])),
        tile=dict(enumerate(tile)),
        constants={
            "kAdds": int(adds),
            **({} if scaling is None else scaling.constants),
        },
        starts={} if scaling is None else {"first_row": (3, 1)},
    )
