"""The choices of a block of tokens to a rank; CUDA half in
`kernels/functions/share_choices.cuh`."""

from __future__ import annotations

from typing import Any

from etc_dist.functions.routing import Routing
from etc_dist.ir import DeviceFunction, Operand
from etc_dist.ir.function import TRANSFER


def share_choices(routing: Routing) -> DeviceFunction:
    """A block's chosen [experts] of a rank, ids and weights [32, top_k] -> the same in
    that rank's memory."""

    def body(*operands: Any) -> None:
        for source, target in zip(operands[:3], operands[3:], strict=True):
            target[...] = source

    words = Operand((routing.experts, 1), "int32")
    ids, weights = (
        Operand(("rows", routing.top_k), dtype, contiguous=True)
        for dtype in ("int32", "float32")
    )
    tile = dict(enumerate([words, ids, weights] * 2))
    return routing.function("share_choices", TRANSFER, 3, 3, body, tile=tile)
