"""Tokens to the ranks of their experts, and their sums back; CUDA halves in
`kernels/tasks/`, one file each.

Experts are numbered through all ranks, each of which has as many. A token goes once to
each rank that has experts of its choice, and comes back from there as one sum.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from etc_dist.ir import DeviceFunction, Operand
from etc_dist.ir.function import TENSOR, TRANSFER
from etc_dist.ops.parts import sum_operand, sum_ranks
from etc_dist.ops.routing import Routing


def share_choices(routing: Routing) -> DeviceFunction:
    """A block's chosen [experts] of a rank, ids and weights [32, top_k] -> the same in
    that rank's memory."""

    def body(*operands: Any) -> None:
        for source, target in zip(operands[:3], operands[3:], strict=True):
            target[...] = source

    words = Operand((routing.experts, 1), "int32")
    ids, weights = (
        Operand(("rows", routing.top_k), dtype, contiguous=True)
        for dtype in ("int32", "float32")
    )
    tile = dict(enumerate([words, ids, weights] * 2))
    return routing.function("share_choices", TRANSFER, 3, 3, body, tile=tile)


def push_tokens(routing: Routing) -> DeviceFunction:
    """x [tokens, hidden], ids [tokens, top_k] and lower, read for its length alone
    [experts of ranks below a rank] -> the rows of those tokens that chose experts of
    that rank, in its memory."""

    def body(x: Any, ids: Any, lower: Any, target: Any) -> None:
        own = ids - len(lower)
        chosen = ((own >= 0) & (own < routing.experts)).any(axis=1)
        target[: len(x)][chosen] = x[chosen]

    rows = Operand(("rows", "hidden"), routing.element)
    ids = Operand(("rows", routing.top_k), "int32")
    tile = {0: rows, 1: ids, 3: rows}
    return routing.function("push_tokens", TENSOR, 3, 1, body, tile=tile)


def sum_parts(routing: Routing) -> DeviceFunction:
    """parts [world, tokens, columns] -> y [tokens, columns]: the sum over ranks, in
    rank order, in fp32. Where experts are split, ids [tokens, top_k] is read too: a
    rank without experts of a token's choice has no part of it."""

    if not routing.split:
        return sum_ranks(routing.dtype)

    def body(parts: Any, ids: Any, y: Any) -> None:
        total = np.zeros(y.shape, np.float32)
        for rank, part in enumerate(parts):
            here = (ids // routing.experts == rank).any(axis=1)
            total[here] += part[here].astype(np.float32)
        y[...] = total.astype(y.dtype)

    tile = {
        0: sum_operand(routing.element),
        1: Operand(("rows", routing.top_k), "int32"),
        2: Operand(("rows", "columns"), routing.element),
    }
    return routing.function("sum_parts", TRANSFER, 2, 1, body, tile=tile)
