"""The choices of a block of tokens to a rank; CUDA half in
`kernels/functions/share_choices.cuh`."""

from __future__ import annotations

from typing import Any

from etc_dist.functions.routing import Routing
from etc_dist.ir import DeviceFunction, Operand
from etc_dist.ir.function import TRANSFER


def share_choices(routing: Routing) -> DeviceFunction:
    """chosen [experts of a rank] (int32), ids [32, top_k] (int32) and weights [32,
    top_k] (fp32) of a block of tokens -> copies in that rank's memory."""

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
