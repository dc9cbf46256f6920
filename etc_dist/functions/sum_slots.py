"""The reduction of a reduce-scatter; CUDA half in `kernels/functions/sum_slots.cuh`."""

from __future__ import annotations

from typing import Any

import numpy as np

from etc_dist.functions.matmul import two_byte
from etc_dist.ir import DeviceFunction, Extent, Operand
from etc_dist.ir.function import TRANSFER

PIECE_ROWS, PIECE_COLUMNS = 32, 64
"""The part of a tile that one warp sums: 4 KB of output."""


def _sum_slots(slots: Any, y: Any) -> None:
    # Rank order and fp32: the same bits on every run, one rounding.
    total = slots[0].astype(np.float32)
    for part in slots[1:]:
        total = total + part.astype(np.float32)
    y[...] = total[: y.shape[0], : y.shape[1]].astype(y.dtype)


def sum_slots(dtype: str, slots: int | None = None) -> DeviceFunction:
    """A piece [world, 1, 1, 32, 64] of slots [world, blocks, columns, 256, 256] that
    `matmul_send` wrote -> y [32, 64]: the sum over ranks in rank order, in fp32.

    dtype: bfloat16 or float16. slots: the number of slots, if not all of the world. On
    GPUs `matmul_send` stores tiles in a special order, so it reads only slots that
    `matmul_send` wrote; `sum_ranks` adds row-major ones."""
    every = Extent(name="world", whole=True) if slots is None else Extent(slots)
    constants = {} if slots is None else {"kSlots": slots}
    rows = Extent(PIECE_ROWS, begins=PIECE_ROWS)
    columns = Extent(PIECE_COLUMNS, begins=PIECE_COLUMNS)
    piece = (Extent(most=PIECE_ROWS), Extent(PIECE_COLUMNS, begins=8, clipped=True))
    return DeviceFunction(
        name="sum_slots",
        body=_sum_slots,
        source="functions/sum_slots.cuh",
        lane=TRANSFER,
        reads=1,
        writes=1,
        constants={"kIsHalf": int(dtype == "float16"), **constants},
        tile={
            0: Operand(
                (every, 1, 1, rows, columns), two_byte(dtype), layout="matmul_send"
            ),
            1: Operand(piece, two_byte(dtype), leading=True),
        },
    )
