"""Tokens and their sums between ranks; CUDA halves in `kernels/tasks/`, one file each.

What a rank computed of a peer's tokens comes back in parts, one of each rank.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from etc_dist.ir import DeviceFunction
from etc_dist.ir.function import TRANSFER
from etc_dist.ops.routing import Routing


def sum_parts(routing: Routing) -> DeviceFunction:
    """parts [world, tokens, columns] -> y [tokens, columns]: the sum over ranks, in
    rank order, in fp32."""

    def body(parts: Any, y: Any) -> None:
        total = np.zeros(y.shape, np.float32)
        for part in parts:
            total += part.astype(np.float32)
        y[...] = total.astype(y.dtype)

    return routing.function("sum_parts", TRANSFER, 1, 1, body)
