"""A mixture of experts, token by token; CUDA halves in `kernels/tasks/`, one file each.

Tasks of the first product find out by themselves, from the logits, which experts their
token picks; those of the second, which have other things to wait for, are told."""

from __future__ import annotations

from typing import Any

import numpy as np

from etc_dist.ir import DeviceFunction, Extent, Operand
from etc_dist.ir.function import TENSOR
from etc_dist.ops.matmul import silu
from etc_dist.ops.routing import Routing, best_experts


def score_token(routing: Routing) -> DeviceFunction:
    """x [1, hidden], router [experts, hidden] of some experts -> logits [1, experts] in
    fp32."""

    def body(x: Any, router: Any, logits: Any) -> None:
        logits[...] = x.astype(np.float32) @ router.astype(np.float32).T

    tile = {
        0: Operand((1, "hidden"), routing.element),
        1: Operand(("scored", "hidden"), routing.element),
        2: Operand((1, "scored"), "float32"),
    }
    return routing.function("score_token", TENSOR, 2, 1, body, tile=tile)


def gate_up_token(routing: Routing) -> DeviceFunction:
    """x [1, hidden], logits [1, experts], gate and up [experts, columns, hidden], down
    [experts, rows, inner] -> activations [1, top_k, columns], for the experts that the
    token picks. Of down, the L2 cache is asked for rows of half of these experts: a
    task that follows will read them."""

    def body(x: Any, logits: Any, gate: Any, up: Any, down: Any, active: Any) -> None:
        row = x[0].astype(np.float32)
        ids, _ = best_experts(logits, routing.top_k, routing.normalize)
        for k, expert in enumerate(ids[0]):
            left, right = (w[expert].astype(np.float32) @ row for w in (gate, up))
            active[0, k] = (silu(left) * right).astype(active.dtype)

    early = 0, 2, 3, 4
    weight = Operand((routing.experts, "columns", "hidden"), routing.element)
    tile = {
        0: Operand((1, "hidden"), routing.element),
        1: Operand((1, routing.experts), "float32"),
        2: weight,
        3: weight,
        4: _prefetched(routing),
        5: Operand((1, routing.top_k, "columns"), routing.element),
    }
    return routing.function("gate_up_token", TENSOR, 5, 1, body, early=early, tile=tile)


def pick_token(routing: Routing) -> DeviceFunction:
    """logits [1, experts] -> ids [1, top_k] (int32), weights [1, top_k] (fp32): the
    experts that the token picks, the best one first."""

    def body(logits: Any, ids: Any, weights: Any) -> None:
        ids[...], weights[...] = best_experts(logits, routing.top_k, routing.normalize)

    tile = {
        0: Operand((1, routing.experts), "float32"),
        1: Operand((1, routing.top_k), "int32"),
        2: Operand((1, routing.top_k), "float32"),
    }
    return routing.function("pick_token", TENSOR, 1, 2, body, tile=tile)


def down_token(routing: Routing) -> DeviceFunction:
    """ids and weights [1, top_k], active [1, top_k, inner], down [experts, columns,
    inner], the same again or without columns -> y [1, columns]: the weighted sum over
    the experts that the token picks, in fp32. The first weights are sent for before the
    activations are there; then the L2 cache is asked for `asked` of those experts for
    which the first product's tasks have not."""

    def body(
        ids: Any, weights: Any, active: Any, down: Any, asked: Any, y: Any
    ) -> None:
        total = np.zeros(y.shape[1], np.float32)
        for k, expert in enumerate(ids[0]):
            row = down[expert].astype(np.float32) @ active[0, k].astype(np.float32)
            total += weights[0, k] * row
        y[0] = total.astype(y.dtype)

    early, inner = (0, 1, 3, 4), Extent(name="inner", whole=True)
    # The rows of a weight come in pairs.
    columns = Extent(name="columns", multiple=2)
    tile = {
        0: Operand((1, routing.top_k), "int32"),
        1: Operand((1, routing.top_k), "float32"),
        2: Operand((1, routing.top_k, inner), routing.element),
        3: Operand((routing.experts, columns, inner), routing.element),
        4: _prefetched(routing),
        5: Operand((1, columns), routing.element),
    }
    return routing.function("down_token", TENSOR, 5, 1, body, early=early, tile=tile)


def _prefetched(routing: Routing) -> Operand:
    whole = Extent(whole=True)
    return Operand((routing.experts, None, whole), routing.element)
