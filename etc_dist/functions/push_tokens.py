"""Tokens to the rank of their experts; CUDA half in
`kernels/functions/push_tokens.cuh`.

Experts are numbered over all ranks, each of which has equally many. A token is sent
once to each rank that has experts of its choice, which returns one sum."""

from __future__ import annotations

from typing import Any

from etc_dist.functions.routing import Routing
from etc_dist.ir import DeviceFunction, Operand
from etc_dist.ir.function import TENSOR


def push_tokens(routing: Routing) -> DeviceFunction:
    """x [tokens, hidden], ids [tokens, top_k] (int32) and lower, whose length is the
    number of experts of the ranks below the target -> the rows of x of the tokens that
    chose experts of the target, in its memory; its other rows are not written. x may
    have fewer rows than ids."""

    def body(x: Any, ids: Any, lower: Any, target: Any) -> None:
        local_ids = ids - len(lower)
        is_target = ((local_ids >= 0) & (local_ids < routing.experts)).any(axis=1)[
            : len(x)
        ]
        target[: len(x)][is_target] = x[is_target]

    rows = Operand(("rows", "hidden"), routing.element)
    ids = Operand(("rows", routing.top_k), "int32")
    tile = {0: rows, 1: ids, 3: rows}
    return routing.function("push_tokens", TENSOR, 3, 1, body, tile=tile)
