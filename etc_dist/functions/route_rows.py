"""The experts of a step's rows, and the tiles of the experts' rows; CUDA half in
`kernels/functions/route_rows.cuh`.

A row chooses `top_k` experts, as `best_experts` gives them. Few rows choose in this
task, which saves an event; more choose in tasks of `choose_rows`. The rows that chose
an expert are divided into tiles, which are numbered by expert. Tile t has a place for
up to `stride` rows, from row t * stride on, of which at most `tile_rows` are used.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from etc_dist.functions.choose_rows import NONE, choices_of_rows
from etc_dist.functions.routing import Routing
from etc_dist.ir import DeviceFunction, Extent, Operand
from etc_dist.ir.function import TENSOR

MOST_ROWS = 128
"""Rows of a step at most."""
MOST_AT_ONCE = 16
"""Rows for which the task chooses at most: two for each warp."""


def route_rows(routing: Routing, *, early: bool = False) -> DeviceFunction:
    """logits [new, experts] (fp32) and position [new] of the first rows, at most 16;
    ids [rows, top_k], of which those of later rows are known -> ids and weights (fp32)
    [new, top_k] of the first rows, as `choices_of_rows` gives them; place [rows,
    top_k]; tiles [tiles, 2], of each its expert and its number of rows, 0 for unused
    ones; used [1], how many are used. int32 but for logits and weights.

    `tile_rows`, `stride`: see above. `gathers`: if 1, place is where each chosen row
    lies among those of all tiles. If 0, an expert has one tile, with all rows of the
    step in their order. early: position may be read before the last wait."""

    def body(
        logits: Any,
        position: Any,
        known: Any,
        new: Any,
        weights: Any,
        place: Any,
        tiles: Any,
        used: Any,
        *,
        tile_rows: int,
        stride: int,
        gathers: int,
    ) -> None:
        new[...], weights[...] = choices_of_rows(logits, position, routing)
        ids = np.concatenate([new, known[len(new) :]])
        tiles[...], place[...] = 0, NONE
        first = 0
        for expert in range(routing.experts):
            rows, choice = np.nonzero(ids == expert)
            number = np.arange(len(rows)) if gathers else rows
            tile, within = np.divmod(number, tile_rows)
            place[rows, choice] = (first + tile) * stride + within
            counts = np.bincount(tile) if gathers else [len(ids)] * bool(len(rows))
            end = first + len(counts)
            tiles[first:end, 0], tiles[first:end, 1] = expert, counts
            first = end
        used[...] = first

    new, top_k = Extent(most=MOST_AT_ONCE, name="new"), routing.top_k
    rows = Extent(most=MOST_ROWS, name="rows")
    tile = {
        0: Operand((new, routing.experts), "float32"),
        1: Operand((new,), "int32", leading=True),
        2: Operand((rows, top_k), "int32", leading=True),
        3: Operand((new, top_k), "int32", leading=True),
        4: Operand((new, top_k), "float32"),
        5: Operand((rows, top_k), "int32", leading=True),
        6: Operand(("tiles", 2), "int32", leading=True),
        7: Operand((1,), "int32", leading=True),
    }
    before = (1,) if early else ()
    return routing.function(
        *("route_rows", TENSOR, 3, 5, body), reads_before_wait=before, tile=tile
    )
