"""The reduction of a reduce-scatter; CUDA half in `kernels/tasks/sum_slots.cuh`."""

from __future__ import annotations

from typing import Any

import numpy as np

from etc_dist.ir import DeviceFunction
from etc_dist.ir.function import TRANSFER

PIECE_ROWS, PIECE_COLUMNS = 32, 64
"""The part of a tile that one warp sums: 4 KB of output."""


def _sum_slots(slots: Any, y: Any) -> None:
    # Rank order and fp32: the same bits on every run, one rounding.
    total = slots[0].astype(np.float32)
    for part in slots[1:]:
        total = total + part.astype(np.float32)
    y[...] = total[: y.shape[0], : y.shape[1]].astype(y.dtype)


def sum_slots(dtype: str) -> DeviceFunction:
    """slots [world, 32, 64] -> y [32, 64]: the sum over ranks in rank order, in
    fp32."""
    return DeviceFunction(
        name="sum_slots",
        body=_sum_slots,
        source="tasks/sum_slots.cuh",
        lane=TRANSFER,
        reads=1,
        writes=1,
        constants={"kIsHalf": int(dtype == "float16")},
    )
