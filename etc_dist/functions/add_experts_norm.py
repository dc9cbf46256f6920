"""RMSNorm of a residual and the outputs of a row's experts; CUDA half in
`kernels/functions/add_experts_norm.cuh`."""

from __future__ import annotations

from typing import Any

import numpy as np

from etc_dist.functions.rms_norm import normalized
from etc_dist.functions.routing import Routing
from etc_dist.ir import DeviceFunction, Extent, Operand
from etc_dist.ir.function import TENSOR


def add_experts_norm(
    routing: Routing, eps: float, *, early: bool = False
) -> DeviceFunction:
    """place and weights [rows, top_k], outputs [any, columns], residual [rows,
    columns], gain [columns] -> the residual plus the weighted sum of a row's outputs,
    in the order of its choices, and the RMSNorm of this sum, both [rows, columns]. A
    place below 0 has no output. Computed in fp32, rounded once; the sum may replace the
    residual. On GPUs one row. early: all but the outputs may be read before the last
    wait."""

    def body(
        place: Any,
        weights: Any,
        outputs: Any,
        residual: Any,
        gain: Any,
        total: Any,
        y: Any,
    ) -> None:
        sums = np.zeros(residual.shape, np.float32)
        for k in range(routing.top_k):
            here = place[:, k] >= 0
            part = outputs[place[here, k]].astype(np.float32)
            sums[here] += weights[here, k, None] * part
        total[...] = (sums + residual.astype(np.float32)).astype(total.dtype)
        y[...] = normalized(total, gain, eps).astype(y.dtype)

    columns = Extent(name="columns", multiple=8, begins=8)
    row = Operand((1, columns), routing.element, leading=True)
    tile = {
        0: Operand((1, routing.top_k), "int32", leading=True),
        1: Operand((1, routing.top_k), "float32"),
        2: Operand((Extent(begins=0), columns), routing.element),
        3: row,
        4: Operand((columns,), routing.element, leading=True),
        5: row,
        6: row,
    }
    return routing.function(
        "add_experts_norm",
        TENSOR,
        5,
        2,
        body,
        gathers=(2,),
        reads_before_wait=(0, 1, 3, 4) if early else (),
        tile=tile,
        constants={"kEps": float(eps)},
    )
