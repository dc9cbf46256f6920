"""The experts of a step's rows, and the tiles of the experts' rows; CUDA half in
`kernels/functions/route_rows.cuh`.

A row chooses `top_k` experts, as `best_experts` gives them. The rows that chose an
expert are divided into tiles, which are numbered by expert. Tile t has a place for up
to `stride` rows, from row t * stride on, of which at most `tile_rows` are used.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from etc_dist.functions.best_experts import best_experts
from etc_dist.functions.routing import Routing
from etc_dist.ir import DeviceFunction, Extent, Operand
from etc_dist.ir.function import TENSOR

MOST_ROWS = 128
"""Rows of a step at most."""
NONE = -1
"""The expert and the place of a row that belongs to no request."""


def route_rows(routing: Routing, *, early: bool = False) -> DeviceFunction:
    """logits [rows, experts] (fp32), position [rows] -> ids, weights (fp32) and place
    [rows, top_k]; tiles [tiles, 2], of each its expert and its number of rows, 0 for
    unused ones; used [1], how many are used. int32 but for logits and weights.

    Rows with a position below 0 choose no expert. `tile_rows`, `stride`: see above.
    `gathers`: if 1, place is where each chosen row lies among those of all tiles. If 0,
    an expert has one tile, with all rows of the step in their order. early: position
    may be read before the last wait."""

    def body(
        logits: Any,
        position: Any,
        ids: Any,
        weights: Any,
        place: Any,
        tiles: Any,
        used: Any,
        *,
        tile_rows: int,
        stride: int,
        gathers: int,
    ) -> None:
        ids[...], weights[...] = best_experts(logits, routing.top_k, routing.normalize)
        unused = position < 0
        ids[unused], weights[unused], place[...] = NONE, 0, NONE
        tiles[...] = 0
        first = 0
        for expert in range(routing.experts):
            rows, choice = np.nonzero(ids == expert)
            number = np.arange(len(rows)) if gathers else rows
            tile, within = np.divmod(number, tile_rows)
            place[rows, choice] = (first + tile) * stride + within
            counts = np.bincount(tile) if gathers else [len(logits)] * bool(len(rows))
            end = first + len(counts)
            tiles[first:end, 0], tiles[first:end, 1] = expert, counts
            first = end
        used[...] = first

    rows = Extent(most=MOST_ROWS, name="rows")
    choices = rows, routing.top_k
    tile = {
        0: Operand((rows, routing.experts), "float32"),
        1: Operand((rows,), "int32", leading=True),
        2: Operand(choices, "int32", leading=True),
        3: Operand(choices, "float32"),
        4: Operand(choices, "int32", leading=True),
        5: Operand(("tiles", 2), "int32", leading=True),
        6: Operand((1,), "int32", leading=True),
    }
    before = (1,) if early else ()
    return routing.function(
        *("route_rows", TENSOR, 2, 5, body), reads_before_wait=before, tile=tile
    )
