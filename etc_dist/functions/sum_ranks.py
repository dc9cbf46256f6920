"""Sums over ranks; CUDA half in `kernels/functions/sum_ranks.cuh`."""

from __future__ import annotations

from typing import Any

import numpy as np

from etc_dist.functions.add_partials import add_partials, sum_in_order, vector_columns
from etc_dist.functions.combine_rows import add_shared_rows, shared_operands
from etc_dist.functions.routing import Routing
from etc_dist.ir import DeviceFunction, Operand
from etc_dist.ir.function import TRANSFER


def sum_ranks(dtype: str, parts: int | None = None) -> DeviceFunction:
    """partials [world, rows, columns] of `dtype`, row-major -> their sum [rows,
    columns] in rank order, in fp32, rounded once. On GPUs columns and the index of the
    first one are multiples of 8. parts: their number, if not `world`."""
    if dtype == "float32":
        return add_partials(dtype)
    constants = {} if parts is None else {"kParts": parts}

    def body(partials: Any, y: Any) -> None:
        y[...] = sum_in_order(partials).astype(y.dtype)

    return DeviceFunction(
        name="sum_ranks",
        body=body,
        source="functions/sum_ranks.cuh",
        lane=TRANSFER,
        reads=1,
        writes=1,
        constants={
            "kIsHalf": int(dtype == "float16"),
            "kSplit": 0,
            "kShared": 0,
            **constants,
        },
        tile={
            0: _partials(dtype, parts),
            1: Operand(("rows", vector_columns(dtype)), dtype, leading=True),
        },
    )


def sum_expert_ranks(
    routing: Routing, shared: str = "", *, has_none: bool = False
) -> DeviceFunction:
    """partials [world, tokens, columns] -> y [tokens, columns], as `sum_ranks`. Where
    experts are split over ranks, it also reads ids [tokens, top_k] (int32), and adds
    for each token only the partials of ranks that have experts of its choice. shared:
    as of `combine_rows`, where experts are split. Then y and what is added for a shared
    expert may have fewer rows than the others. has_none: some may be
    no tokens, without an expert; the sum of these has no meaning."""
    if not routing.split:
        return sum_ranks(routing.dtype)
    return _split_sum(routing, shared, has_none=has_none)


def sum_host_experts(
    routing: Routing, parts: int, shared: str = "", *, has_none: bool = False
) -> DeviceFunction:
    """As `sum_expert_ranks` of split experts, over `parts` ranks or hosts with
    `routing.experts` experts each; it also reads lower, whose length is the number of
    experts before theirs. Rows of y are not written for tokens that chose none,
    unless it has_none."""
    return _split_sum(routing, shared, parts, has_none=has_none)


def _split_sum(
    routing: Routing, shared: str, parts: int | None = None, *, has_none: bool = False
) -> DeviceFunction:
    of_shared = shared_operands(routing.element, shared)

    def body(partials: Any, ids: Any, *others: Any) -> None:
        (*inputs, y), total = others, np.zeros(others[-1].shape, np.float32)
        lower = inputs[: parts is not None]
        partials, ids = partials[:, : len(y)], ids[: len(y)]
        own = (ids - sum(map(len, lower))) // routing.experts
        for rank, partial in enumerate(partials):
            here = (own == rank).any(axis=1)
            total[here] += partial[here].astype(np.float32)
        add_shared_rows(total, *inputs[len(lower) :])
        some = ((own >= 0) & (own < len(partials))).any(axis=1) | has_none
        y[some] = total[some].astype(y.dtype)

    constants: dict[str, float] = {"kShared": len(of_shared)}
    constants |= {"kHasNone": 1} if has_none else {}
    first = 2
    if parts is not None:
        first, constants = 3, {**constants, "kParts": parts}
    reads = first + len(of_shared)
    tile = {
        0: _partials(routing.element, parts),
        1: Operand(("rows", routing.top_k), "int32"),
        **dict(enumerate(of_shared, first)),
        reads: Operand(("rows", "columns"), routing.element, leading=parts is not None),
    }
    return routing.function(
        *("sum_ranks", TRANSFER, reads, 1, body),
        gathers=(0,) if has_none else (),
        tile=tile,
        constants=constants,
    )


def _partials(dtype: str, parts: int | None = None) -> Operand:
    return Operand((parts or "world", "rows", vector_columns(dtype)), dtype)
