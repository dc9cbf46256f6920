"""Choosing the experts of some rows of a step; CUDA half in
`kernels/functions/choose_rows.cuh`."""

from __future__ import annotations

from typing import Any

from etc_dist.functions.best_experts import best_experts
from etc_dist.functions.routing import NONE, Routing
from etc_dist.ir import DeviceFunction, Extent, Operand
from etc_dist.ir.function import TENSOR

CHOSEN_ROWS = 8
"""The most rows of a task: one for each warp."""


def choices_of_rows(logits: Any, position: Any, routing: Routing) -> tuple[Any, Any]:
    """ids and weights [rows, top_k], as of `best_experts`. A row with a position below
    0 has ids NONE and weights 0."""
    ids, weights = best_experts(logits, routing.top_k, routing.normalize)
    ids[position < 0], weights[position < 0] = NONE, 0
    return ids, weights


def choose_rows(routing: Routing, *, early: bool = False) -> DeviceFunction:
    """logits [rows, experts] (fp32), position [rows] (int32) -> ids (int32) and weights
    (fp32) [rows, top_k], those of `choices_of_rows`. On GPUs up to 8 rows. early:
    position may be read before the last wait is met."""

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
