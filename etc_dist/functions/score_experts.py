"""Router logits of a block of tokens; CUDA half in
`kernels/functions/score_experts.cuh`."""

from __future__ import annotations

from typing import Any

import numpy as np

from etc_dist.functions.routing import BLOCK, Routing
from etc_dist.ir import DeviceFunction, Extent, Operand
from etc_dist.ir.function import TENSOR

GROUP_EXPERTS = 32
"""The largest number of experts of a task."""


def score_experts(
    routing: Routing, most: int = GROUP_EXPERTS, *, early: bool = False
) -> DeviceFunction:
    """x [32, hidden], router [experts, hidden] of a group of at most `most` (8, 16 or
    32) -> logits [32, experts] in fp32, in a multiple of 4 columns, of which those
    without an expert have no meaning. early: router may be read before the last
    wait."""

    def body(x: Any, router: Any, logits: Any) -> None:
        logits[:, : len(router)] = x.astype(np.float32) @ router.astype(np.float32).T

    few, rows = Extent(most=most, name="scored"), Extent(most=BLOCK, name="rows")
    logits_columns = Extent(most=most, name="columns", multiple=4, begins=4)
    tile = {
        0: Operand((rows, "hidden"), routing.element, contiguous=True),
        1: Operand((few, "hidden"), routing.element, contiguous=True, leading=True),
        2: Operand((rows, logits_columns), "float32"),
    }
    constants = {"kMostScored": most}
    before = (1,) if early else ()
    return routing.function(
        "score_experts",
        TENSOR,
        2,
        1,
        body,
        reads_before_wait=before,
        tile=tile,
        constants=constants,
    )
