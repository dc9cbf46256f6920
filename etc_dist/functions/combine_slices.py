"""Combining the slices of attention; CUDA half in
`kernels/functions/combine_slices.cuh`."""

from __future__ import annotations

from typing import Any

import numpy as np

from etc_dist.functions.weight_layouts import two_byte
from etc_dist.ir import DeviceFunction, Extent, Operand
from etc_dist.ir.function import TENSOR

SINKS = Operand(("heads",), "float32", leading=True, by_element=True)
"""The logits of attention sinks, one of each query head."""
MOST_ABOVE = 126
"""A sink so far above all scores leaves nothing of them in fp32."""


def combine_slices(
    head_dim: int, dtype: str, *, has_sinks: bool = False, early: bool = False
) -> DeviceFunction:
    """sums [slots, heads, head_dim] and stats [slots, heads, 2] of the slices of a row
    by `attend`, and with has_sinks logits [heads], in fp32 -> y [heads * head_dim] in
    `dtype`, combined in order. A slot with the weight 0 counts nothing, and its sums
    may be any bytes. A logit counts once, as one more score without a value.

    A dim or named number: cuts, as in `plan_shares`. If it is 0, only the first slot
    and every second one after it has a slice. early: where the sums are may be loaded
    before the last wait is met."""

    def body(sums: Any, stats: Any, *operands: Any, cuts: int) -> None:
        *sinks, y = operands
        slot_idxs = slice(None) if cuts else [0, *range(1, len(sums), 2)]
        sums, stats = sums[slot_idxs], stats[slot_idxs]
        largest = stats[..., 0].max(axis=0)
        scale = np.exp2(stats[..., 0] - np.where(np.isinf(largest), 0, largest))
        total = np.zeros(sums.shape[1:], np.float32)
        weight = np.zeros(len(total), np.float32)
        for of_slot, slot_scale, (_, slot_weight) in zip(
            sums, scale, stats.transpose(0, 2, 1), strict=True
        ):
            is_there = slot_weight != 0
            total[is_there] += (of_slot * slot_scale[:, None])[is_there]
            weight += slot_weight * slot_scale
        weight = with_sinks(weight, largest, *sinks)
        total /= np.where(weight == 0, 1, weight)[:, None]
        y[...] = total.reshape(y.shape).astype(y.dtype)

    slots = Extent(name="slots")
    columns = Extent(begins=8, name="heads", times=head_dim)
    return DeviceFunction(
        name="combine_slices",
        body=body,
        source="functions/combine_slices.cuh",
        lane=TENSOR,
        reads=2 + has_sinks,
        writes=1,
        loads_before_wait=early,
        constants={
            "kHeadDim": head_dim,
            "kIsHalf": int(dtype == "float16"),
            **({"kHasSinks": 1} if has_sinks else {}),
        },
        tile=dict(
            enumerate(
                [
                    Operand((slots, "heads", head_dim), "float32"),
                    Operand((slots, "heads", 2), "float32"),
                    *[SINKS] * has_sinks,
                    Operand((columns,), two_byte(dtype), leading=True),
                ]
            )
        ),
    )


def with_sinks(weight: Any, most: Any, sinks: Any = None) -> Any:
    """The sums of the weights [heads] of scores in units of log 2, with those of sinks.
    most: the largest scores [heads], whose weights are 1."""
    if sinks is None:
        return weight
    above = sinks * np.float32(np.log2(np.e)) - most
    return weight + np.exp2(np.minimum(above, np.float32(MOST_ABOVE)))
