"""Sampling the next token; CUDA half in `kernels/functions/sample_column.cuh`.

A row has a `sampling` [5] of int32: the bits of 1 / temperature and of top_p in fp32,
top_k, and the two words of its seed. Its token is the column with the largest sum of
scaled logit and Gumbel noise: this chooses each column with its softmax probability
(Gumbel-max, as in Maddison et al., NeurIPS 2014).
The noise depends only on the row's seed, the row's position and the column: not on
other rows, the number of ranks, or the division of columns into tiles. A row whose
first number is 0 gets the column of the largest logit. As in `best_column.py`, a NaN is
larger than all sums.

`least_kept` runs before, and finds the smallest logit that top_k and top_p keep. All
logits equal to it are kept. A top_k of 0 and a top_p of 1 keep all columns."""

from __future__ import annotations

from typing import Any

import numpy as np

from etc_dist.functions.best_column import best_of_rows, largest
from etc_dist.functions.philox import gumbel, philox
from etc_dist.functions.weight_layouts import two_byte
from etc_dist.ir import DeviceFunction, Extent, Operand
from etc_dist.ir.function import TENSOR

SCALE, TOP_P, TOP_K, SEED, NUMBERS = 0, 1, 2, slice(3, 5), 5
"""The positions of these numbers in `sampling`, and its length."""


def sample_column(dtype: str, columns: int) -> DeviceFunction:
    """x [rows, columns] of `dtype`, which is tile `j` (a coordinate) of the logits;
    sampling [rows, 5] and position [rows] in int32; least [rows] in fp32, of
    `least_kept` -> values [rows] in fp32 and ids [rows] in int32: the largest sum of a
    row, and its column in the tile, as of `best_column`. columns: those of a tile.

    `first`: the id of the tensor's first column, a dim or named number."""

    def body(*operands: Any, j: int, first: int) -> None:
        x, sampling, position, least, values, ids = operands
        numbers = x.astype(np.float32)
        numbers = np.where(numbers < least[:, None], -np.inf, numbers)
        column = first + j * columns + np.arange(x.shape[1])
        counter = np.zeros((*x.shape, 4), np.uint32)
        counter[..., 0] = column // 4
        counter[..., 1] = position.astype(np.uint32)[:, None]
        bits = philox(counter, sampling[:, None, SEED].astype(np.uint32))
        noise = gumbel(np.take_along_axis(bits, column[None, :, None] % 4, axis=2))
        scale = sampling.view(np.float32)[:, SCALE, None]
        with np.errstate(invalid="ignore"):
            sums = np.where(scale > 0, numbers * scale + noise[..., 0], numbers)
        ids[...], values[...] = largest(sums)

    tile = [
        Operand(("rows", Extent(begins=8)), two_byte(dtype)),
        Operand(("rows", NUMBERS), "int32"),
        Operand(("rows",), "int32", leading=True),
        Operand(("rows",), "float32"),
        *best_of_rows(),
    ]
    return DeviceFunction(
        name="sample_column",
        body=body,
        source="functions/sample_column.cuh",
        lane=TENSOR,
        reads=4,
        writes=2,
        constants={"kIsHalf": int(dtype == "float16")},
        tile=dict(enumerate(tile)),
    )


def least_kept(dtype: str) -> DeviceFunction:
    """x [rows, columns] of `dtype`, sampling [rows, 5] in int32 -> least [rows] in
    fp32, the smallest logit that is kept; -inf for rows that keep all. NaNs do not
    count. On GPUs one row.

    top_k keeps the logits that are at least as large as the top_k-th largest. Of these,
    top_p keeps the largest ones: just as many as together have at least top_p of their
    probability.

    On GPUs both are found by a search over the 16 bits of a logit, two bits per pass: 8
    passes over the row for top_k, and 9 for top_p."""

    def body(x: Any, sampling: Any, least: Any) -> None:
        least[...] = -np.inf
        for row, numbers in enumerate(np.where(np.isnan(x), -np.inf, x)):
            scale, top_p = sampling[row, [SCALE, TOP_P]].view(np.float32)
            top_k = sampling[row, TOP_K]
            order = np.sort(numbers.astype(np.float32))[::-1]
            if scale > 0 and top_k > 0:
                least[row] = order[min(top_k, len(order)) - 1]
            if scale > 0 and top_p < 1:
                kept_logits = order[order >= least[row]]
                with np.errstate(invalid="ignore"):
                    weights = np.nan_to_num(
                        np.exp((kept_logits - kept_logits[0]) * scale)
                    )
                sums = weights.astype(np.float64).cumsum()
                least_idx = np.searchsorted(sums, float(top_p) * sums[-1])
                least[row] = kept_logits[min(least_idx, len(kept_logits) - 1)]

    tile = {
        0: Operand((1, Extent(begins=8)), two_byte(dtype)),
        1: Operand((1, NUMBERS), "int32"),
        2: Operand((1,), "float32"),
    }
    return DeviceFunction(
        name="least_kept",
        body=body,
        source="functions/sample_column.cuh",
        lane=TENSOR,
        reads=2,
        writes=1,
        constants={"kIsHalf": int(dtype == "float16")},
        tile=tile,
    )
