"""The rows of a block's choices; CUDA half in `kernels/functions/locate_rows.cuh`."""

from __future__ import annotations

from typing import Any

import numpy as np

from etc_dist.functions.routing import BLOCK, NONE, Routing, bits_of
from etc_dist.ir import DeviceFunction, Extent, Operand
from etc_dist.ir.function import TRANSFER


def locate_rows(routing: Routing) -> DeviceFunction:
    """ids [32, top_k], the block's token_bits [experts] and before [experts],
    expert_row [experts] -> place [32, top_k]: the padded row of each choice. All int32.
    Where experts are split, a further operand is read, lower, whose length is the
    number of experts of lower ranks. The place of choices that are not experts of this
    rank is NONE; only a routing that is split or `has_none` may have such."""

    def body(ids: Any, token_bits: Any, before: Any, row: Any, *operands: Any) -> None:
        *lower, place = operands
        local_ids = ids - len(lower[0]) if lower else ids
        is_local = (local_ids >= 0) & (local_ids < routing.experts)
        expert = np.where(is_local, local_ids, 0)
        bits = bits_of(token_bits)[:, : len(ids)]
        ranks = before[:, None] + np.cumsum(bits, axis=1) - bits
        places = row[expert] + ranks[expert, np.arange(len(ids))[:, None]]
        place[...] = np.where(is_local, places, NONE)

    choices = Operand((Extent(most=BLOCK, name="rows"), routing.top_k), "int32")
    of_block = Operand((routing.experts, 1), "int32")
    tile = {0: choices, 1: of_block, 2: of_block}
    tile[3] = Operand((routing.experts,), "int32")
    reads = 4 + routing.split
    tile[reads] = choices
    constants = {"kHasNone": int(routing.has_none)}
    return routing.function(
        "locate_rows", TRANSFER, reads, 1, body, tile=tile, constants=constants
    )
