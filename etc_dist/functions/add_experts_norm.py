"""RMSNorm of a residual and the outputs of a row's experts; CUDA half in
`kernels/functions/add_experts_norm.cuh`."""

from __future__ import annotations

from typing import Any

import numpy as np

from etc_dist.functions.combine_rows import weighted_sums
from etc_dist.functions.rms_norm import normalized
from etc_dist.functions.routing import SHARED, Routing
from etc_dist.ir import DeviceFunction, Extent, Operand
from etc_dist.ir.function import TENSOR


def add_experts_norm(
    routing: Routing, eps: float, shared: str = "", *, early: bool = False
) -> DeviceFunction:
    """place and weights [rows, top_k], outputs [any, columns], those of a shared
    expert, residual [rows, columns], gain [columns] -> the residual plus the weighted
    sum of a row's outputs, in the order of its choices, and the RMSNorm of this sum,
    both [rows, columns]. A place below 0 has no output. Computed in fp32, rounded once;
    the sum may replace the residual. On GPUs one row.

    shared: PLAIN if the output [rows, columns] of a shared expert is added after those
    of the choices; GATED if it is first multiplied by the sigmoid of a number of each
    row, which follows it [rows, 1]. early: all but outputs may be read before the last
    wait."""

    def body(*operands: Any) -> None:
        *rows, residual, gain, total, y = operands
        sums = weighted_sums(*rows)
        total[...] = (sums + residual.astype(np.float32)).astype(total.dtype)
        y[...] = normalized(total, gain, eps).astype(y.dtype)

    columns = Extent(name="columns", multiple=8, begins=8)
    row = Operand((1, columns), routing.element, leading=True)
    of_shared = [row, Operand((1, 1), "float32")][: ("", *SHARED).index(shared)]
    tile = [
        Operand((1, routing.top_k), "int32", leading=True),
        Operand((1, routing.top_k), "float32"),
        Operand((Extent(begins=0), columns), routing.element),
        *of_shared,
        row,
        Operand((columns,), routing.element, leading=True),
        row,
        row,
    ]
    num_reads, last = 5 + len(of_shared), range(3 + len(of_shared), 5 + len(of_shared))
    return routing.function(
        "add_experts_norm",
        TENSOR,
        num_reads,
        2,
        body,
        gathers=(2,),
        reads_before_wait=(0, 1, *range(4, 3 + len(of_shared)), *last) if early else (),
        tile=dict(enumerate(tile)),
        constants={
            "kEps": float(eps),
            **({"kShared": len(of_shared)} if shared else {}),
        },
    )
