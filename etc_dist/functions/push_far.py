"""The transfer between hosts; CUDA half in `kernels/functions/push_far.cuh`."""

from __future__ import annotations

from typing import Any

from etc_dist.ir import DeviceFunction, Operand
from etc_dist.ir.function import TRANSFER


def _push_far(x: Any, target: Any) -> None:
    target[...] = x


def push_far() -> DeviceFunction:
    """A region of a tensor -> a copy in the memory of a rank of this host, or of a
    partner: a rank of another host with this local rank. With one notification there.

    Both regions are contiguous in memory, with equal sizes and dtypes (any), apart from
    each other. A call writes to `tensor.on(rank)`, and notifies one element of
    `events.on(rank)`, by the same expression of the rank. What it reads is in a
    symmetric tensor, and keeps its values until the end of the run."""
    return DeviceFunction(
        name="push_far",
        body=_push_far,
        source="functions/push_far.cuh",
        lane=TRANSFER,
        reads=1,
        writes=1,
        tile={
            0: Operand(contiguous=True, apart=True),
            1: Operand(contiguous=True, like=0),
        },
        far=True,
    )
