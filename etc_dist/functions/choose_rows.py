"""The experts of some rows of a step; CUDA half in
`kernels/functions/choose_rows.cuh`."""

from __future__ import annotations

from typing import Any

from etc_dist.functions.best_experts import best_experts
from etc_dist.functions.routing import Routing
from etc_dist.ir import DeviceFunction, Extent, Operand
from etc_dist.ir.function import TENSOR

CHOSEN_ROWS = 8
"""Rows for which a task chooses: one for each warp."""
NONE = -1
"""The expert and the place of a row that belongs to no request."""


def choices_of_rows(logits: Any, position: Any, routing: Routing) -> tuple[Any, Any]:
    """ids and weights [rows, top_k], as `best_experts` gives them. Rows with a position
    below 0 choose no expert."""
    ids, weights = best_experts(logits, routing.top_k, routing.normalize)
    ids[position < 0], weights[position < 0] = NONE, 0
    return ids, weights


def choose_rows(routing: Routing, *, early: bool = False) -> DeviceFunction:
    """logits [8, experts] (fp32), position [8] (int32) -> ids (int32) and weights
    (fp32) [8, top_k], those of `choices_of_rows`; or fewer rows. early: position may be
    read before the last wait."""

    def body(logits: Any, position: Any, ids: Any, weights: Any) -> None:
        ids[...], weights[...] = choices_of_rows(logits, position, routing)

    rows = Extent(most=CHOSEN_ROWS, name="rows")
    choices = rows, routing.top_k
    tile = {
        0: Operand((rows, routing.experts), "float32"),
        1: Operand((rows,), "int32", leading=True),
        2: Operand(choices, "int32", leading=True),
        3: Operand(choices, "float32"),
    }
    before = (1,) if early else ()
    return routing.function(
        *("choose_rows", TENSOR, 2, 2, body), reads_before_wait=before, tile=tile
    )
