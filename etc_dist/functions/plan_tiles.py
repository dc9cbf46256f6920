"""Tiles of the rows of all experts; CUDA half in `kernels/functions/plan_tiles.cuh`."""

from __future__ import annotations

from typing import Any

from etc_dist.functions.routing import PADDING, Routing
from etc_dist.ir import DeviceFunction, Operand
from etc_dist.ir.function import TENSOR

TOGETHER = 4
"""Tiles that alternate over the same columns of an expert's weights, which may be
larger than the L2 cache."""


def plan_tiles(routing: Routing) -> DeviceFunction:
    """counts [experts], the tokens of each expert, and a list of tokens, of which only
    the length is used -> expert_row [experts], each expert's first padded row; for
    each tile [tiles] its tile_expert, tile_row (the first padded row), tile_rows and
    tile_first (where its tokens begin in the lists of all experts); and num_groups
    [1], of groups of TOGETHER tiles that are needed. All int32; 0 for tiles that are
    not needed."""

    def body(
        counts: Any,
        tokens: Any,
        expert_row: Any,
        tile_expert: Any,
        tile_row: Any,
        tile_rows: Any,
        tile_first: Any,
        num_groups: Any,
    ) -> None:
        for array in (tile_expert, tile_row, tile_rows, tile_first):
            array[...] = 0
        row = number = 0
        for expert, count in enumerate(counts.tolist()):
            expert_row[expert] = row
            least = max(-(-count // routing.tile_rows), 1)
            share = min(_padded(-(-count // least)), routing.tile_rows)
            for first in range(0, count, max(share, 1)):
                tile_expert[number] = expert
                tile_row[number] = row + first
                tile_rows[number] = min(share, count - first)
                tile_first[number] = expert * len(tokens) + first
                number += 1
            row += _padded(count)
        num_groups[0] = -(-number // TOGETHER)

    of_expert, of_tile = (Operand((n,), "int32") for n in (routing.experts, "tiles"))
    operands = [of_expert, Operand((None,), "int32"), of_expert, *[of_tile] * 4]
    operands.append(Operand((1,), "int32"))
    return routing.function(
        "plan_tiles", TENSOR, 2, 6, body, tile=dict(enumerate(operands))
    )


def _padded(rows: int) -> int:
    return -(-rows // PADDING) * PADDING
