"""Sums over ranks; CUDA half in `kernels/functions/sum_ranks.cuh`."""

from __future__ import annotations

from typing import Any

import numpy as np

from etc_dist.functions.add_partials import add_partials, sum_in_order, vector_columns
from etc_dist.functions.routing import Routing
from etc_dist.ir import DeviceFunction, Operand
from etc_dist.ir.function import TRANSFER


def sum_ranks(dtype: str) -> DeviceFunction:
    """partials [world, rows, columns] of `dtype`, row-major -> their sum [rows,
    columns] in rank order, in fp32, rounded once. On GPUs columns and the index of the
    first one are multiples of 8."""
    if dtype == "float32":
        return add_partials(dtype)

    def body(partials: Any, y: Any) -> None:
        y[...] = sum_in_order(partials).astype(y.dtype)

    return DeviceFunction(
        name="sum_ranks",
        body=body,
        source="functions/sum_ranks.cuh",
        lane=TRANSFER,
        reads=1,
        writes=1,
        constants={"kIsHalf": int(dtype == "float16"), "kSplit": 0},
        tile={
            0: _partials(dtype),
            1: Operand(("rows", vector_columns(dtype)), dtype),
        },
    )


def sum_expert_ranks(routing: Routing) -> DeviceFunction:
    """partials [world, tokens, columns] -> y [tokens, columns], as `sum_ranks`. Where
    experts are split over ranks, it also reads ids [tokens, top_k] (int32), and adds
    for each token only the partials of ranks that have experts of its choice."""
    if not routing.split:
        return sum_ranks(routing.dtype)

    def body(partials: Any, ids: Any, y: Any) -> None:
        total = np.zeros(y.shape, np.float32)
        for rank, partial in enumerate(partials):
            here = (ids // routing.experts == rank).any(axis=1)
            total[here] += partial[here].astype(np.float32)
        y[...] = total.astype(y.dtype)

    tile = {
        0: _partials(routing.element),
        1: Operand(("rows", routing.top_k), "int32"),
        2: Operand(("rows", "columns"), routing.element),
    }
    return routing.function("sum_ranks", TRANSFER, 2, 1, body, tile=tile)


def _partials(dtype: str) -> Operand:
    return Operand(("world", "rows", vector_columns(dtype)), dtype)
