"""An expert's tokens; CUDA half in `kernels/functions/list_rows.cuh`."""

from __future__ import annotations

from typing import Any

import numpy as np

from etc_dist.functions.routing import Routing, bits_of
from etc_dist.ir import DeviceFunction, Operand
from etc_dist.ir.function import TENSOR, TRANSFER


def list_rows(routing: Routing) -> DeviceFunction:
    """One expert's words token_bits [blocks] -> before [blocks], the number of tokens
    of earlier blocks that chose it; tokens, the indices of those that did (the rest of
    the region is not written); count, how many. All int32."""

    def body(token_bits: Any, before: Any, tokens: Any, count: Any) -> None:
        bits = bits_of(token_bits)[:, : routing.block]
        block_counts = bits.sum(axis=1)
        before[...] = np.cumsum(block_counts) - block_counts
        count[...] = block_counts.sum()
        token_idxs = np.flatnonzero(bits)
        tokens[: len(token_idxs)] = token_idxs

    # If tokens come from other ranks, the warps of the tensor lane are sending them.
    lane = TRANSFER if routing.split else TENSOR
    words = Operand((1, "blocks"), "int32")
    scalar = Operand((1,), "int32")
    tile = {0: words, 1: words, 2: Operand((None,), "int32"), 3: scalar}
    return routing.function("list_rows", lane, 1, 3, body, tile=tile)
