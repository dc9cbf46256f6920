"""The transfer of an all-gather; CUDA half in `kernels/functions/push_rows.cuh`."""

from __future__ import annotations

from typing import Any

from etc_dist.ir import DeviceFunction, Operand
from etc_dist.ir.function import TRANSFER

PACKET_BYTES = 32768
"""Bytes that one warp pushes before it notifies, unless one row is longer."""


def _push_rows(x: Any, target: Any) -> None:
    target[tuple(map(slice, x.shape))] = x


def push_rows(lane: str = TRANSFER) -> DeviceFunction:
    """A region of a tensor -> a copy in this rank's memory or a peer's.

    Both regions are contiguous in memory, such as whole rows or a part of one row, with
    equal sizes and dtypes (any), apart from each other; if one is clipped at the rows
    of a rank, these are copied. They may have any number of axes. lane: the tensor lane
    where the wait takes most of a run."""
    return DeviceFunction(
        name="push_rows",
        body=_push_rows,
        source="functions/push_rows.cuh",
        lane=lane,
        reads=1,
        writes=1,
        tile={
            0: Operand(contiguous=True, apart=True),
            1: Operand(contiguous=True, like=0),
        },
    )
