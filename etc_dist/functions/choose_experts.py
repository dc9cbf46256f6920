"""The choices of some tokens; CUDA half in `kernels/functions/choose_experts.cuh`."""

from __future__ import annotations

from typing import Any

import numpy as np

from etc_dist.functions.routing import BLOCK, NONE, Routing
from etc_dist.ir import DeviceFunction, Extent, Operand
from etc_dist.ir.function import TENSOR

CHOSEN_ROWS = 8
"""Rows of a task that ends soon: one for each warp."""


def choose_experts(
    routing: Routing,
    most: int = BLOCK,
    *,
    marks: bool = False,
    has_position: bool = False,
    early: bool = False,
    fills: bool = False,
    has_count: bool = False,
) -> DeviceFunction:
    """logits [rows, experts] (fp32) of at most `most` tokens, then the router's biases
    [experts] (fp32) -> ids [rows, top_k] (int32) and weights [rows, top_k] (fp32), as
    `Router.choose` gives them.

    marks: it also writes token_bits [experts] (int32), of which bit i is set if token i
    chose the expert. has_position: it also reads position [rows] (int32), after the
    logits; a row with a position below 0 has ids NONE and weights 0. early: position
    may be read before the last wait is met. fills: ids and weights may have further
    rows, which get NONE and 0. has_count: after the logits it reads count [1] (int32),
    and a region before, whose length is the number of tokens before these; rows of
    tokens from count on are such rows, too."""
    further = has_position + 2 * has_count
    num_reads, num_writes = 1 + further + len(routing.router.bias_names), 2 + marks

    def body(logits: Any, *operands: Any) -> None:
        inputs, (ids, weights, *token_bits) = (
            operands[: num_reads - 1],
            operands[num_reads - 1 :],
        )
        biases = inputs[further:]
        if has_count:
            logits = logits[: max(0, inputs[0][0] - len(inputs[1]))]
        ids[len(logits) :], weights[len(logits) :] = NONE, 0
        ids, weights = ids[: len(logits)], weights[: len(logits)]
        ids[...], weights[...] = routing.router.choose(logits, *biases)
        if has_position:
            leave_out(inputs[0], ids, weights)
        if marks:
            token_bits[0][...] = _bits(ids, routing.experts)

    # The bits of a word are a whole block.
    rows = (
        Extent(most, name="rows", clipped=True)
        if marks
        else Extent(most=most, name="rows")
    )
    tile = [Operand((rows, routing.experts), "float32")]
    if has_position:
        tile.append(Operand((rows,), "int32", leading=True))
    if has_count:
        tile.append(Operand((1,), "int32", by_element=True))
        tile.append(Operand((None, 1), by_element=True))
    tile += routing.router.operands(routing.experts)
    tile.append(Operand((rows, routing.top_k), "int32", leading=True))
    tile.append(Operand((rows, routing.top_k), "float32", leading=True))
    if marks:
        tile.append(Operand((routing.experts, 1), "int32"))
    return routing.function(
        "choose_experts",
        TENSOR,
        num_reads,
        num_writes,
        body,
        reads_before_wait=(1,) if early else (),
        tile=dict(enumerate(tile)),
        constants={
            **routing.choice_constants(has_position),
            "kMostRows": most,
            "kMarks": int(marks),
            **({"kFills": 1} if fills else {}),
            **({"kHasCount": 1} if has_count else {}),
        },
    )


def leave_out(position: Any, ids: Any, weights: Any) -> None:
    """A row with a position below 0 has ids NONE and weights 0."""
    ids[position < 0], weights[position < 0] = NONE, 0


def _bits(ids: Any, experts: int) -> Any:
    """ids [tokens, top_k] -> words [experts] (int32) of which bit i is token i's."""
    bits = np.zeros((len(ids), experts), np.uint32)
    np.put_along_axis(bits, ids, np.uint32(1), axis=1)
    token = np.arange(len(bits), dtype=np.uint32)
    return np.bitwise_or.reduce(bits << token[:, None], axis=0).view(np.int32)
