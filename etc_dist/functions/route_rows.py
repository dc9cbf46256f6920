"""Routing of a step's rows to experts, and the tiles of the experts' rows; CUDA half in
`kernels/functions/route_rows.cuh`.

A row chooses its experts as the router says. Few rows choose in this task, which
saves an event; otherwise tasks of `choose_experts` have chosen before. The rows of an
expert are divided into tiles, and tiles are numbered in the order of experts. Tile t
has the `stride` places from t * stride on, and uses at most the first `tile_rows`."""

from __future__ import annotations

from typing import Any

import numpy as np

from etc_dist.functions.choose_experts import leave_out
from etc_dist.functions.routing import NONE, Routing
from etc_dist.ir import DeviceFunction, Extent, Operand
from etc_dist.ir.function import TENSOR

MOST_AT_ONCE = 16
"""The most rows that choose in this task: two for each warp."""


def route_rows(
    routing: Routing, *, early: bool = False, num_own_experts: int = 0
) -> DeviceFunction:
    """The first `new` rows, at most 16, choose their experts; those of the other rows
    are known. int32, except logits and weights (fp32):

    logits [new, experts] and position [new] of the first rows; ids [rows, top_k], read
    from row `new` on; the router's biases [experts] -> ids and weights [new, top_k] of
    the first rows, those of `choose_experts`; place [rows, top_k], that of each choice,
    or NONE; tiles [tiles, 2], expert and number of rows of each tile, (0, 0) for unused
    ones; num_tiles [1], the number of used tiles.

    `tile_rows`, `stride`: see above. `gathers`: 1 if a tile has only the rows that
    chose its expert; 0 if each chosen expert has one tile with all rows of the step, in
    their order. early: position may be read before the last wait is met.
    num_own_experts: only so many experts are on each rank, those of rank 0 first; other
    choices have no place, and tiles count experts from the rank's first."""

    def body(
        logits: Any,
        position: Any,
        earlier_ids: Any,
        *operands: Any,
        tile_rows: int,
        stride: int,
        gathers: int,
        rank: int = 0,
    ) -> None:
        *biases, new, weights, place, tiles, num_tiles = operands
        new[...], weights[...] = routing.router.choose(logits, *biases)
        leave_out(position, new, weights)
        ids = np.concatenate([new, earlier_ids[len(new) :]])
        tiles[...], place[...] = 0, NONE
        first, begin = 0, rank * num_own_experts
        for expert in range(begin, begin + (num_own_experts or routing.experts)):
            rows, choice = np.nonzero(ids == expert)
            number = np.arange(len(rows)) if gathers else rows
            tile, within = np.divmod(number, tile_rows)
            place[rows, choice] = (first + tile) * stride + within
            counts = np.bincount(tile) if gathers else [len(ids)] * bool(len(rows))
            end = first + len(counts)
            tiles[first:end, 0], tiles[first:end, 1] = expert - begin, counts
            first = end
        num_tiles[...] = first

    new, top_k = Extent(most=MOST_AT_ONCE, name="new"), routing.top_k
    tile = [
        Operand((new, routing.experts), "float32"),
        Operand((new,), "int32", leading=True),
        Operand(("rows", top_k), "int32", leading=True),
        *routing.router.operands(routing.experts),
        Operand((new, top_k), "int32", leading=True),
        Operand((new, top_k), "float32"),
        Operand(("rows", top_k), "int32", leading=True),
        Operand(("tiles", 2), "int32", leading=True),
        Operand((1,), "int32", leading=True),
    ]
    return routing.function(
        "route_rows",
        TENSOR,
        3 + len(routing.router.bias_names),
        5,
        body,
        reads_before_wait=(1,) if early else (),
        tile=dict(enumerate(tile)),
        constants={
            **routing.choice_constants(has_position=True),
            **({"kOwnExperts": num_own_experts} if num_own_experts else {}),
        },
    )
