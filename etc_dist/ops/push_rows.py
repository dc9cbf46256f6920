"""The transfer of an all-gather; CUDA half in `kernels/tasks/push_rows.cuh`."""

from __future__ import annotations

from typing import Any

from etc_dist.ir import DeviceFunction
from etc_dist.ir.function import TRANSFER

PACKET_BYTES = 32768
"""What one warp pushes before it notifies, where rows are not longer than that."""


def _push_rows(x: Any, gathered: Any) -> None:
    gathered[...] = x


def push_rows() -> DeviceFunction:
    """x [rows, k] -> the same rows in a peer's memory; both contiguous."""
    return DeviceFunction(
        name="push_rows",
        body=_push_rows,
        source="tasks/push_rows.cuh",
        lane=TRANSFER,
        reads=1,
        writes=1,
    )
