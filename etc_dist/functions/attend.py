"""Attention over a paged cache; CUDA half in `kernels/functions/attend.cuh`.

`append_kv.py` describes rows, pages and the cache. A row attends to all positions of
its request up to its own, or to a window, the last ones of these. They are divided into
slices of whole blocks of BLOCK positions. Each slice is a task, and `combine_slices`
combines the results. The number of slices that a row uses depends on its length, so
that its sums have the same bits in each batch with enough slices.

Sources: slices as in Flash-Decoding (Dao et al., 2023), pages as in PagedAttention
(Kwon et al., SOSP 2023)."""

from __future__ import annotations

from typing import Any

import numpy as np

from etc_dist.functions.append_kv import PagedCache
from etc_dist.ir import DeviceFunction, Extent, Operand

HEADS = 8
"""The most query heads of a KV head in a task."""
TOGETHER = 4
"""The most KV heads of a task: each then has two warps."""
BLOCK = 16
"""Positions that a warp multiplies at once."""
SLICE_POSITIONS = 128
"""The fewest positions of a slice that is not the only one: a block for each of the 8
warps of a worker."""


def attend(
    paged: PagedCache,
    slice_positions: int = SLICE_POSITIONS,
    *,
    group: int = HEADS,
    early: bool = False,
) -> DeviceFunction:
    """q [rows, heads * head_dim], with biases also that of q [heads * head_dim],
    `PagedCache.operands` of the rows, and cache [pages, 2, KV heads, page_size,
    head_dim] -> the results of slice `s` (a coordinate) of `slices` (a dim or named
    number):

    * sums [rows, heads, 1, head_dim] in fp32: the values, weighted by 2 ** (score -
      largest score), with scores in units of log 2.
    * stats [rows, heads, 1, 2] in fp32: the largest score, and the sum of the weights;
      (-inf, 0) for a slice without positions.
    * y [rows, heads * head_dim]: the result of a row with a single slice. It has the
      bits that `combine_slices` gives.

    Either sums and stats or y may be empty: axis 2 of sums and stats, or the rows of y,
    have size 0. q, cache and y are in the cache's dtype.

    A row uses at most as many slices, a power of two, as have `slice_positions` each.
    Each KV head has `group` query heads, the last one may have fewer. On GPUs a task
    has one row, at most TOGETHER KV heads, which share the warps of a worker, and at
    most HEADS query heads of each. early: all reads but q and the cache may come before
    the last wait is met."""
    dim, scale = paged.head_dim, score_scale(paged)

    def body(q: Any, *others: Any, s: int, slices: int) -> None:
        if paged.has_bias:
            q, others = paged.biased(q, others[0]), others[1:]
        *first, cos_sin, request, position, table, cache, sums, stats, y = others
        gain, (window, of_layer) = paged.split(first)
        total = np.zeros((len(q), q.shape[1] // dim, dim), np.float32)
        most, weight = np.full(total.shape[:2], -np.inf), np.zeros(total.shape[:2])
        cache = cache.reshape(len(cache), 2, -1, paged.page_size, dim)
        lengths = paged.lengths(cos_sin, request, position, table)
        for row in np.flatnonzero(lengths):
            length = int(lengths[row])
            at = slice_of(length, s, slices, slice_positions, length - int(window))
            numbers = table[request[row], at // paged.page_size]
            is_page = (numbers >= 0) & (numbers < len(cache))
            numbers, slots = numbers[is_page], at[is_page] % paged.page_size
            if len(numbers) == 0:
                continue
            heads = q[row].reshape(-1, dim)
            angles = cos_sin[position[row] + of_layer]
            heads = paged.rotated(heads, gain, angles)
            for n in range(cache.shape[2]):
                keys, values = (
                    cache[numbers, i, n, slots].astype(np.float32) for i in range(2)
                )
                own = slice(n * group, (n + 1) * group)
                scores = heads[own].astype(np.float32) @ keys.T * scale
                most[row, own] = scores.max(axis=1)
                weights = np.exp2(scores - scores.max(axis=1, keepdims=True))
                total[row, own] = weights @ values
                weight[row, own] = weights.sum(axis=1)
        sums[...] = total[:, :, None]
        stats[...] = np.stack([most, weight], axis=2)[:, :, None]
        if len(y):
            total /= np.where(weight == 0, 1, weight).astype(np.float32)[..., None]
            y[...] = total.reshape(y.shape).astype(y.dtype)

    columns = Extent(begins=8, name="heads", times=dim)
    queries = Extent(most=TOGETHER * group * dim, begins=8, name="heads", times=dim)
    heads = Extent(most=TOGETHER, name="heads", per=group)
    reads = {
        "q": Operand((1, queries), paged.element),
        "bias": Operand((queries,), paged.element, leading=True),
        **paged.operands(1),
        "cache": paged.pages(heads),
    }
    writes = {
        "sums": Operand((1, "heads", Extent(most=1), dim), "float32"),
        "stats": Operand((1, "heads", Extent(most=1), 2), "float32"),
        "y": Operand((Extent(most=1), columns), paged.element),
    }
    cache = len(paged.present(reads)) - 1
    constants = {
        "kGroup": group,
        "kScale": float(scale),
        "kSlicePositions": slice_positions,
        "kHasCopies": int(early),
    }
    return paged.function(
        *("attend", body, reads, writes, constants),
        gathers=(cache,),
        reads_before_wait=paged.before_wait(1) if early else (),
    )


def slice_of(length: int, s: int, slices: int, least: int, begin: int = 0) -> Any:
    """The positions of slice `s` of a row of `length` positions, from `begin` on if
    this is above 0. least: the fewest positions of a slice."""
    before = max(begin, 0) // BLOCK
    most = max(1, (length - before * BLOCK) // least)
    used = min(slices, 1 << (most.bit_length() - 1))
    blocks = -(-length // BLOCK) - before
    first, end = ((before + blocks * min(n, used) // used) * BLOCK for n in (s, s + 1))
    return np.arange(max(first, begin), min(end, length))


def score_scale(paged: PagedCache) -> np.float32:
    """The scale of scores, in units of log 2."""
    if paged.score_scale is not None:
        return np.float32(np.log2(np.e) * paged.score_scale)
    return np.float32(np.log2(np.e) / np.sqrt(paged.head_dim))
