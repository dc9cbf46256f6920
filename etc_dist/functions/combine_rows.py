"""Weighted sums of tokens' rows; CUDA half in `kernels/functions/combine_rows.cuh`."""

from __future__ import annotations

from typing import Any

import numpy as np

from etc_dist.functions.routing import SHARED, Routing
from etc_dist.ir import DeviceFunction, Extent, Operand
from etc_dist.ir.function import TRANSFER

GROUP_TOKENS = 2
"""Tokens whose rows one warp combines; divides BLOCK."""


def combine_rows(routing: Routing, shared: str = "") -> DeviceFunction:
    """place and weights [tokens, top_k], outputs [rows, columns] -> y [tokens,
    columns]: the weighted sum of a token's rows of `outputs`, in the order of its
    choices, in fp32. The row of a token without places is zero; if experts are split,
    it is not written, unless there is a shared expert.

    shared: PLAIN if it also reads rows [tokens, columns] of a shared expert, which are
    added last; GATED if it then reads logits [tokens, 1], whose sigmoids are their
    weights."""

    def body(place: Any, weights: Any, outputs: Any, *operands: Any) -> None:
        *of_shared, y = operands
        total = weighted_sums(place, weights, outputs, *of_shared)
        some = (place >= 0).any(axis=1) | (not routing.split) | bool(shared)
        y[some] = total[some].astype(y.dtype)

    columns = Extent(name="columns", multiple=8, begins=8)
    tile = [
        Operand(("rows", routing.top_k), "int32", leading=True),
        Operand(("rows", routing.top_k), "float32", by_element=True),
        Operand((Extent(begins=0), columns), routing.element),
        *shared_operands(routing.element, shared),
        Operand(("rows", columns), routing.element, leading=True),
    ]
    return routing.function(
        "combine_rows",
        TRANSFER,
        len(tile) - 1,
        1,
        body,
        gathers=(2,),
        tile=dict(enumerate(tile)),
        constants={
            "kHasNone": int(routing.has_none),
            "kShared": len(tile) - 4,
        },
    )


def shared_operands(element: str, shared: str) -> list[Operand]:
    """The operands of a shared expert: the last reads of functions that add it."""
    columns = Extent(name="columns", multiple=8, begins=8)
    rows, logits = Operand(("rows", columns), element), Operand(("rows", 1), "float32")
    return [rows, logits][: ("", *SHARED).index(shared)]


def weighted_sums(place: Any, weights: Any, outputs: Any, *of_shared: Any) -> Any:
    """Sums in fp32 of the outputs at places from 0 on, in the order of choices, then of
    a shared expert, if there is one."""
    total = np.zeros((len(place), outputs.shape[1]), np.float32)
    for k in range(place.shape[1]):
        has_place = place[:, k] >= 0
        # fp64 holds the product of two fp32 numbers exactly: one rounding, as fma.
        part = outputs[place[has_place, k]].astype(np.float64)
        sums = total[has_place] + weights[has_place, k, None] * part
        total[has_place] = sums.astype(np.float32)
    add_shared_rows(total, *of_shared)
    return total


def add_shared_rows(total: Any, rows: Any = None, logits: Any = None) -> None:
    """Add the rows of a shared expert, if there is one, times the sigmoid of its
    logits, if there are any, to sums in fp32."""
    if rows is None:
        return
    weights = 1 if logits is None else 1 / (1 + np.exp(-np.maximum(logits, -80)))
    total[...] = rows.astype(np.float64) * weights + total  # as above
