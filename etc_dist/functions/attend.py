"""Attention over a paged cache; CUDA half in `kernels/functions/attend.cuh`.

`append_kv.py` describes rows, pages and the cache, `plan_shares.py` the shares. A row
attends to all positions of its request up to its own, or to a window, the last of them.

*Unit of work.* A task has one KV head, up to HEADS of its query heads, and one or two
adjacent shares for each of its workers: each share is a list of slices of rows. All
shares are equally long, however long the rows are.

*Stages.* The loading thread fills the ring of stages by bulk copies: a stage has the
keys, then the values, of STAGE positions of one slice, 32 KB of 128 elements. These are
1 to 4 runs of positions in a page, each of two copies, of 4 KB or more. Stages of both
lists of a worker alternate while both last. Page numbers are read in groups, one ahead,
and what a row is, a row ahead. Up to MOST_BYTES are in flight. A task begins before
this step's queries, keys and values are there, with stages that earlier steps stored.

*Computation.* A warpgroup has a list; each of its four warps multiplies a block of
BLOCK positions, the M of an mma, by HEADS queries, its N, from shared memory. While one
list ends a slice, the stages of the other one are computed. The eight chunks of 16
bytes of a position are permuted in the cache so that eight positions occupy all banks.

*Sums.* The sums of four warps are added through shared memory, in order. A whole row is
stored at once. Of other slices the sums are stored in fp32, and `combine_slices` adds
those of a row in the order of positions.

Sources: slices as in Flash-Decoding (Dao et al., 2023), equal shares as in Stream-K
(Osama et al., 2023), pages as in PagedAttention (Kwon et al., SOSP 2023)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from etc_dist.functions.append_kv import PagedCache
from etc_dist.functions.combine_slices import SINKS, with_sinks
from etc_dist.functions.plan_shares import BOUND, CUTS, EXTENT, STAGE, slices_of
from etc_dist.ir import DeviceFunction, Expr, Extent, Operand, Tensor
from etc_dist.ir.expr import minimum
from etc_dist.ir.function import COMPUTE, LOAD, PREPARE

HEADS = 8
"""The most query heads of a KV head in a task."""
BLOCK = 16
"""Positions that a warp multiplies at once."""
MOST_BYTES = 128 * 1024
"""The most bytes of a worker in flight. With 192 KB a prototype needed a fifth more
time for rows of unequal length, on an H200."""
BUFFER_BYTES = {64: 17920, 128: 17920, 256: 26624}
"""Shared memory in which the sums of the warps are added, and of large heads also that
of the query, by their size."""


def attend(paged: PagedCache, *, early: bool = False) -> DeviceFunction:
    """q [rows, heads * head_dim] of one KV head, with biases also that of q [heads *
    head_dim], the gain and span of `PagedCache.operands`, with sinks their logits
    [heads] in fp32, cos_sin and table, cache [pages, 2, page_size, head_dim] of that
    head, and extents and bounds of `plan_shares` -> results of the shares of task `j`
    (a coordinate):

    * sums [slots, heads, head_dim] in fp32: the values of the slices of these slots,
      weighted by 2 ** (score - largest score), with scores in units of log 2.
    * stats [slots, heads, 2] in fp32: the largest score, and the sum of the weights;
      (-inf, 0) for a slot without a slice.
    * y [rows, heads * head_dim]: of the rows that begin and end in these shares; zeros
      for a row without positions. It has the bits that `combine_slices` gives.

    The regions are those of `written`. q, cache and y are in the cache's dtype.

    Dims or named numbers: shares_of_task, one or two; cuts, as in `plan_shares`. early:
    all reads but q and, of the cache, positions that this step stores may come before
    the last wait is met."""

    def body(q: Any, *operands: Any, j: int, shares_of_task: int, cuts: int) -> None:
        extents, bounds, sums, stats, y = operands[-5:]
        rows = AttendedRows(paged, q, operands[:-5], extents)
        row, stage, _, first_slot = bounds[j * shares_of_task]
        first_row = row + (stage > 0)
        stats[...] = -np.inf, 0
        for share in range(j * shares_of_task, (j + 1) * shares_of_task):
            for row, first, end, slot in slices_of(extents, bounds, share, cuts):
                total, most, weight = rows.sums(row, first, end)
                if slot is None:
                    y[row - first_row] = rows.result(total, most, weight)
                else:
                    sums[slot - first_slot] = total
                    stats[slot - first_slot] = np.stack([most, weight], axis=1)

    reads, writes = _operands(paged)
    cache = len(paged.present(reads)) - 3
    return paged.function(
        "attend",
        body,
        reads,
        writes,
        constants_of(paged),
        # NOTE: with `early`, the load role reads pages before the last wait is met. No
        # proof sees which ones: positions of earlier steps, by the contract above.
        gathers=(cache,),
        reads_before_wait=[n for n in range(1, cache + 3) if n != cache and early],
        loads_before_wait=early,
        roles=(PREPARE, LOAD, COMPUTE),
        shared=BUFFER_BYTES[paged.head_dim],
    )


def _operands(paged: PagedCache) -> tuple[dict[str, Operand], dict[str, Operand]]:
    """The reads and the writes."""
    dim = paged.head_dim
    reads = {
        **reads_of_rows(paged),
        "bounds": Operand((Extent(whole=True), BOUND), "int32", leading=True),
    }
    columns = Extent(begins=8, name="heads", times=dim)
    writes = {
        "sums": Operand((None, "heads", dim), "float32"),
        "stats": Operand((None, "heads", 2), "float32"),
        "y": Operand((None, columns), paged.element),
    }
    return reads, writes


def constants_of(paged: PagedCache) -> dict[str, float]:
    """What the CUDA bodies know of scores, stages and slices."""
    cap = _score_cap(paged)
    return {
        "kScale": float(score_scale(paged)),
        "kStage": STAGE,
        **CUTS,
        "kMostBytes": MOST_BYTES,
        **({"kHasSinks": 1} if paged.has_sinks else {}),
        **({"kScoreCap": float(cap)} if cap else {}),
    }


def reads_of_rows(paged: PagedCache) -> dict[str, Operand]:
    """The operands from the queries to the extents."""
    dim = paged.head_dim
    queries = Extent(most=HEADS * dim, begins=8, name="heads", times=dim)
    every = paged.operands("rows")
    return {
        "q": Operand(("rows", queries), paged.element),
        "bias": Operand((queries,), paged.element, leading=True),
        **{n: every[n] for n in ("gain", "span")},
        "sinks": SINKS,
        **{n: every[n] for n in ("cos_sin", "table")},
        "cache": paged.pages(),
        "extents": Operand(("rows", EXTENT), "int32", leading=True),
    }


class AttendedRows:
    """Attention of rows in NumPy. operands: from the biases to the cache."""

    def __init__(
        self, paged: PagedCache, q: Any, operands: Sequence[Any], extents: Any
    ) -> None:
        if paged.has_bias:
            q, operands = paged.biased(q, operands[0]), operands[1:]
        *of_cache, self._cos_sin, self._table, self._cache = operands
        self._sinks = of_cache.pop() if paged.has_sinks else None
        self._gain, (_, self._first_angles) = paged.split(of_cache)
        self._paged, self._q, self._extents = paged, q, extents

    def sums(self, row: int, first: int, end: int) -> tuple[Any, Any, Any]:
        """The weighted values of some positions of a row, the largest scores, and the
        sums of the weights."""
        paged, at = self._paged, np.arange(first, end)
        dim = paged.head_dim
        heads, keys, values = self._q[row].reshape(-1, dim), *np.zeros((2, 0, dim))
        if end > 0:
            _, length, _, request = self._extents[row]
            angles = self._cos_sin[length - 1 + self._first_angles]
            heads = paged.rotated(heads, self._gain, angles)
            numbers, slots = (
                self._table[request, at // paged.page_size],
                at % paged.page_size,
            )
            keys, values = (
                paged.placed(self._cache[numbers, i, slots], slots) for i in range(2)
            )
        return _weighted(heads, keys, values, score_scale(paged), _score_cap(paged))

    def result(self, total: Any, most: Any, weight: Any) -> Any:
        """Of the sums of all positions of a row."""
        weight = with_sinks(weight, most, self._sinks)
        mean = total / np.where(weight == 0, 1, weight)[:, None]
        return mean.ravel().astype(self._q.dtype)


def _score_cap(paged: PagedCache) -> np.float32:
    """That of scores in units of log 2; 0 for none."""
    return np.float32(np.log2(np.e) * (paged.score_cap or 0))


def _weighted(
    heads: Any, keys: Any, values: Any, scale: Any, cap: Any
) -> tuple[Any, Any, Any]:
    """The weighted values, the largest scores, and the sums of the weights. cap: of
    scores in units of log 2; 0 for none."""
    scores = heads.astype(np.float32) @ keys.T.astype(np.float32) * scale
    scores = cap * np.tanh(scores / cap) if cap else scores
    most = scores.max(axis=1, initial=-np.inf)
    weights = np.exp2(scores - most[:, None])
    return weights @ values.astype(np.float32), most, weights.sum(axis=1)


def written(
    bounds: Tensor, at: tuple[Expr, ...], j: Expr, shares: Expr
) -> tuple[tuple[Expr, Expr], tuple[Expr, Expr]]:
    """The start and the size of what task j of `shares` shares writes: of its rows of
    y, and of its slots. bounds [*at, shares + 1, BOUND]: see `plan_shares`."""
    (row, stage, slot), (end_row, _, end_slot) = (
        [bounds.load(*at, number * shares, n) for n in (0, 1, 3)]
        for number in (j, j + 1)
    )
    first = row + minimum(1, stage)
    return (first, end_row - first), (slot, end_slot - slot)


def score_scale(paged: PagedCache) -> np.float32:
    """The scale of scores, in units of log 2."""
    if paged.score_scale is not None:
        return np.float32(np.log2(np.e) * paged.score_scale)
    return np.float32(np.log2(np.e) / np.sqrt(paged.head_dim))
