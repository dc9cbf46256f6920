"""Tokens to experts and back; CUDA halves in `kernels/tasks/`, one file each.

A token picks `top_k` experts. An expert's tokens, in the order of their indices, are
numbered by rank; its ranks are cut into as few tiles as can be, alike but the last, and
its rows of activations and results begin at a multiple of PADDING.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from etc_dist.ir import DeviceFunction, Extent, Operand
from etc_dist.ir.function import TENSOR, TRANSFER
from etc_dist.ops.matmul import two_byte

BLOCK = 32
"""Tokens that one task routes: the bits of a word of `chosen`; at most 32."""
TILE_ROWS = 288
"""Rows of a tile at most."""
GROUP_TOKENS = 2
"""Tokens whose rows one warp combines; divides BLOCK."""
GROUP_EXPERTS = 32
"""Experts at most of which a task computes the logits."""
PADDING = 32
"""An expert's rows begin and end at a multiple of so many: the bulk copies of a tile's
rows of activations, 16 at a time and by two workers, touch no other expert's."""


@dataclass(frozen=True)
class Routing:
    """How tokens are routed, and the sizes of it that are fixed on the GPU.

    experts: those of this rank. split: there are more, on other ranks, and some or all
    of a token's choices are theirs."""

    experts: int
    top_k: int
    normalize: bool
    dtype: str
    block: int = BLOCK
    tile_rows: int = TILE_ROWS
    split: bool = False

    def function(
        self,
        name: str,
        lane: str,
        reads: int,
        writes: int,
        body: Callable[..., None],
        picks: tuple[int, ...] = (),
        early: tuple[int, ...] = (),
        tile: Mapping[int, Operand] | None = None,
    ) -> DeviceFunction:
        return DeviceFunction(
            name=name,
            body=body,
            source=f"tasks/{name}.cuh",
            lane=lane,
            reads=reads,
            writes=writes,
            constants={
                "kExperts": self.experts,
                "kIsHalf": int(self.dtype == "float16"),
                "kNormalize": int(self.normalize),
                "kSplit": int(self.split),
                "kTileRows": self.tile_rows,
                "kTopK": self.top_k,
            },
            picks=picks,
            early=early,
            tile={} if tile is None else tile,
        )

    @property
    def element(self) -> str:
        """The dtype of what CUDA bodies read and write in two bytes."""
        return two_byte(self.dtype)


def score_experts(routing: Routing) -> DeviceFunction:
    """x [32, hidden], router [experts, hidden] of a group of at most 32 -> logits [32,
    experts] in fp32."""

    def body(x: Any, router: Any, logits: Any) -> None:
        logits[...] = x.astype(np.float32) @ router.astype(np.float32).T

    few = Extent(most=GROUP_EXPERTS)
    logits_columns = Extent(most=GROUP_EXPERTS, multiple=4, begins=4)
    tile = {
        0: Operand((BLOCK, "hidden"), routing.element, contiguous=True),
        1: Operand((few, "hidden"), routing.element, contiguous=True),
        2: Operand((BLOCK, logits_columns), "float32"),
    }
    return routing.function("score_experts", TENSOR, 2, 1, body, tile=tile)


def best_experts(logits: Any, top_k: int, normalize: bool) -> tuple[Any, Any]:
    """logits [tokens, experts] -> ids [tokens, top_k] of the highest, of equal ones the
    smaller expert first, and their weights: the softmax over all experts, or, where
    these are to be normalised, over those picked."""
    ids = np.argsort(-logits, axis=1, kind="stable")[:, :top_k]
    share = np.exp(logits - logits.max(axis=1, keepdims=True))
    picked = np.take_along_axis(share, ids, axis=1)
    whole = picked if normalize else share
    return ids, picked / whole.sum(axis=1, keepdims=True)


def choose_experts(routing: Routing) -> DeviceFunction:
    """logits [32, experts] -> ids and weights [32, top_k] as of `best_experts`; chosen
    [experts], whose bit i is set where token i chose the expert."""

    def body(logits: Any, ids: Any, weights: Any, chosen: Any) -> None:
        ids[...], weights[...] = best_experts(logits, routing.top_k, routing.normalize)
        bits = np.zeros(logits.shape, np.uint32)
        np.put_along_axis(bits, ids, np.uint32(1), axis=1)
        token = np.arange(len(bits), dtype=np.uint32)
        words = np.bitwise_or.reduce(bits << token[:, None], axis=0)
        chosen[...] = words.view(np.int32)

    tile = {
        0: Operand((BLOCK, routing.experts), "float32"),
        1: Operand((BLOCK, routing.top_k), "int32"),
        2: Operand((BLOCK, routing.top_k), "float32"),
        3: Operand((routing.experts, 1), "int32"),
    }
    return routing.function("choose_experts", TENSOR, 1, 3, body, tile=tile)


def list_rows(routing: Routing) -> DeviceFunction:
    """An expert's chosen [blocks] -> before [blocks], the tokens of earlier blocks that
    chose it; tokens, those that did, what is behind them left alone; how many."""

    def body(chosen: Any, before: Any, tokens: Any, count: Any) -> None:
        bits = _bits(chosen)[:, : routing.block]
        each = bits.sum(axis=1)
        before[...] = np.cumsum(each) - each
        count[...] = each.sum()
        found = np.flatnonzero(bits)
        tokens[: len(found)] = found

    # Where tokens come from other ranks, the tensor lane's warps are busy sending them.
    lane = TRANSFER if routing.split else TENSOR
    words = Operand((1, "blocks"), "int32")
    one = Operand((1,), "int32")
    tile = {0: words, 1: words, 2: Operand((None,), "int32"), 3: one}
    return routing.function("list_rows", lane, 1, 3, body, tile=tile)


def plan_tiles(routing: Routing) -> DeviceFunction:
    """counts [experts] of tokens, and an expert's list of these, read for its length
    alone -> expert_row [experts], the first padded row; tile_expert, tile_row (its
    first padded row), tile_rows and tile_first (where its tokens begin in the lists of
    all experts) [tiles], all 0 for tiles that are not needed."""

    def body(
        counts: Any,
        tokens: Any,
        expert_row: Any,
        tile_expert: Any,
        tile_row: Any,
        tile_rows: Any,
        tile_first: Any,
    ) -> None:
        for array in (tile_expert, tile_row, tile_rows, tile_first):
            array[...] = 0
        row = number = 0
        for expert, count in enumerate(counts.tolist()):
            expert_row[expert] = row
            least = max(-(-count // routing.tile_rows), 1)
            share = min(_padded(-(-count // least)), routing.tile_rows)
            for first in range(0, count, max(share, 1)):
                tile_expert[number] = expert
                tile_row[number] = row + first
                tile_rows[number] = min(share, count - first)
                tile_first[number] = expert * len(tokens) + first
                number += 1
            row += _padded(count)

    of_expert, of_tile = (Operand((n,), "int32") for n in (routing.experts, "tiles"))
    each = [of_expert, Operand((None,), "int32"), of_expert, *[of_tile] * 4]
    return routing.function(
        "plan_tiles", TENSOR, 2, 5, body, tile=dict(enumerate(each))
    )


def locate_rows(routing: Routing) -> DeviceFunction:
    """ids [32, top_k], the block's chosen [experts] and before [experts], expert_row
    [experts] -> place [32, top_k]: the padded row of each choice. Where experts are
    split, one operand more is read, for its length alone: lower [experts of lower
    ranks]; the place of other ranks' rows is -1."""

    def body(ids: Any, chosen: Any, before: Any, row: Any, *rest: Any) -> None:
        *lower, place = rest
        own = ids - len(lower[0]) if lower else ids
        known = (own >= 0) & (own < routing.experts)
        expert = np.where(known, own, 0)
        bits = _bits(chosen)[:, : len(ids)]
        ranks = before[:, None] + np.cumsum(bits, axis=1) - bits
        found = row[expert] + ranks[expert, np.arange(len(ids))[:, None]]
        place[...] = np.where(known, found, -1)

    choices = Operand((Extent(most=BLOCK, name="rows"), routing.top_k), "int32")
    of_block = Operand((routing.experts, 1), "int32")
    tile = {0: choices, 1: of_block, 2: of_block}
    tile[3] = Operand((routing.experts,), "int32")
    reads = 4 + routing.split
    tile[reads] = choices
    return routing.function("locate_rows", TRANSFER, reads, 1, body, tile=tile)


def combine_rows(routing: Routing) -> DeviceFunction:
    """place and weights [tokens, top_k], product [rows, columns] -> y [tokens,
    columns]: the weighted sum of a token's rows, in the order of its choices, in
    fp32. Tokens of whose choices this rank has none are left alone."""

    def body(place: Any, weights: Any, product: Any, y: Any) -> None:
        total = np.zeros(y.shape, np.float32)
        for k in range(routing.top_k):
            here = place[:, k] >= 0
            # A product of two fp32 numbers is exact in fp64: one rounding, as by fma.
            part = product[place[here, k]].astype(np.float64)
            sums = total[here] + weights[here, k, None] * part
            total[here] = sums.astype(np.float32)
        some = (place >= 0).any(axis=1)
        y[some] = total[some].astype(y.dtype)

    columns = Extent(name="columns", multiple=8, begins=8)
    tile = {
        0: Operand(("rows", routing.top_k), "int32"),
        1: Operand(("rows", routing.top_k), "float32"),
        2: Operand((Extent(begins=0), columns), routing.element),
        3: Operand(("rows", columns), routing.element, leading=True),
    }
    return routing.function("combine_rows", TRANSFER, 3, 1, body, picks=(2,), tile=tile)


def _bits(words: Any) -> Any:
    """Words [...] -> their bits [..., 32], the lowest first."""
    shifted = words.astype(np.uint32)[..., None] >> np.arange(32, dtype=np.uint32)
    return (shifted & np.uint32(1)).astype(np.int64)


def _padded(rows: int) -> int:
    return -(-rows // PADDING) * PADDING
