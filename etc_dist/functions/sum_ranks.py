"""Sums over ranks; CUDA half in `kernels/functions/sum_ranks.cuh`."""

from __future__ import annotations

from typing import Any

import numpy as np

from etc_dist.functions.add_partials import add_partials, sum_in_order, vector_columns
from etc_dist.functions.combine_rows import add_shared_rows, shared_operands
from etc_dist.functions.routing import Routing
from etc_dist.ir import DeviceFunction, Operand
from etc_dist.ir.function import TRANSFER


def sum_ranks(
    dtype: str, parts: int | None = None, *, has_own: bool = False
) -> DeviceFunction:
    """partials [world, rows, columns] of `dtype`, row-major -> their sum [rows,
    columns] in rank order, in fp32, rounded once. On GPUs columns and the index of the
    first one are multiples of 8. parts: their number, if not `world`. has_own: the
    second read [rows, columns] is this rank's part, whose place in partials is not
    read."""
    if dtype == "float32":
        return add_partials(dtype)
    constants = {} if parts is None else {"kParts": parts}
    row = Operand(("rows", vector_columns(dtype)), dtype, leading=True)

    def body(partials: Any, y: Any) -> None:
        y[...] = sum_in_order(partials).astype(y.dtype)

    def body_with_own(partials: Any, own_part: Any, y: Any, *, rank: int) -> None:
        every = [own_part if n == rank else part for n, part in enumerate(partials)]
        y[...] = sum_in_order(np.stack(every)).astype(y.dtype)

    return DeviceFunction(
        name="sum_ranks",
        body=body_with_own if has_own else body,
        source="functions/sum_ranks.cuh",
        lane=TRANSFER,
        reads=1 + has_own,
        writes=1,
        gathers=[0] if has_own else [],
        constants={
            "kIsHalf": int(dtype == "float16"),
            "kSplit": 0,
            "kShared": 0,
            **({"kHasOwn": 1} if has_own else {}),
            **constants,
        },
        tile={0: _partials(dtype, parts), **dict.fromkeys(range(1, 2 + has_own), row)},
    )


def added_at_once(parts: int) -> int:
    """The elements of a sum whose loads a warp has in flight: in pieces of at most 512
    columns, of two rows if there are two parts."""
    return 1024 if parts <= 2 else 512 if parts <= 4 else 256


def sum_expert_ranks(
    routing: Routing, parts: int, shared: str = "", *, has_none: bool = False
) -> DeviceFunction:
    """partials [parts, tokens, columns], ids [tokens, top_k] (int32), and lower -> y
    [tokens, columns], as `sum_ranks`, over ranks or hosts with `routing.experts`
    experts each. Only the partials are added of those that have experts of a token's
    choice. The length of lower is the number of experts before theirs. Rows of y are
    not written for tokens that chose none.

    shared: as of `combine_rows`. Then y and what is added for a shared expert may have
    fewer rows than the others. has_none: some rows are no tokens, without an expert;
    all rows are written, and the sums of these have no meaning."""
    of_shared = shared_operands(routing.element, shared)

    def body(partials: Any, ids: Any, lower: Any, *operands: Any) -> None:
        (*inputs, y), total = operands, np.zeros(operands[-1].shape, np.float32)
        partials, ids = partials[:, : len(y)], ids[: len(y)]
        owner_ranks = (ids - len(lower)) // routing.experts
        for rank, partial in enumerate(partials):
            here = (owner_ranks == rank).any(axis=1)
            total[here] += partial[here].astype(np.float32)
        add_shared_rows(total, *inputs)
        some = ((owner_ranks >= 0) & (owner_ranks < len(partials))).any(
            axis=1
        ) | has_none
        y[some] = total[some].astype(y.dtype)

    constants: dict[str, float] = {"kShared": len(of_shared), "kParts": parts}
    constants |= {"kHasNone": 1} if has_none else {}
    num_reads = 3 + len(of_shared)
    tile = {
        0: _partials(routing.element, parts),
        1: Operand(("rows", routing.top_k), "int32"),
        **dict(enumerate(of_shared, 3)),
        num_reads: Operand(("rows", "columns"), routing.element, leading=True),
    }
    return routing.function(
        "sum_ranks",
        TRANSFER,
        num_reads,
        1,
        body,
        gathers=(0,) if has_none else (),
        tile=tile,
        constants=constants,
    )


def _partials(dtype: str, num_parts: int | None = None) -> Operand:
    return Operand((num_parts or "world", "rows", vector_columns(dtype)), dtype)
