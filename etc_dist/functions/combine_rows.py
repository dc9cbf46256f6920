"""Weighted sums of tokens' rows; CUDA half in `kernels/functions/combine_rows.cuh`."""

from __future__ import annotations

from typing import Any

import numpy as np

from etc_dist.functions.routing import Routing
from etc_dist.ir import DeviceFunction, Extent, Operand
from etc_dist.ir.function import TRANSFER

GROUP_TOKENS = 2
"""Tokens whose rows one warp combines; divides BLOCK."""


def combine_rows(routing: Routing) -> DeviceFunction:
    """place and weights [tokens, top_k], outputs [rows, columns] -> y [tokens,
    columns]: the weighted sum of a token's rows of `outputs`, in the order of its
    choices, in fp32. The row of a token without places is zero; if experts are split,
    it is not written."""

    def body(place: Any, weights: Any, outputs: Any, y: Any) -> None:
        total = np.zeros(y.shape, np.float32)
        for k in range(routing.top_k):
            here = place[:, k] >= 0
            # fp64 holds the product of two fp32 numbers exactly: one rounding, as fma.
            part = outputs[place[here, k]].astype(np.float64)
            sums = total[here] + weights[here, k, None] * part
            total[here] = sums.astype(np.float32)
        some = (place >= 0).any(axis=1) | (not routing.split)
        y[some] = total[some].astype(y.dtype)

    columns = Extent(name="columns", multiple=8, begins=8)
    tile = {
        0: Operand(("rows", routing.top_k), "int32", leading=True),
        1: Operand(("rows", routing.top_k), "float32", by_element=True),
        2: Operand((Extent(begins=0), columns), routing.element),
        3: Operand(("rows", columns), routing.element, leading=True),
    }
    constants = {"kHasNone": int(routing.has_none)}
    return routing.function(
        *("combine_rows", TRANSFER, 3, 1, body),
        gathers=(2,),
        tile=tile,
        constants=constants,
    )
