"""Storing keys and values of new positions in a paged KV cache; CUDA half in
`kernels/functions/append_kv.cuh`.

A row of a step is one position of one request: row r has position[r] of request[r].
Several rows may belong to one request. A row with a position below 0 belongs to none.
The cache of a layer is [pages, 2, heads, page_size, head_dim], keys and then values.
Position p of request q is in page table[q, p // page_size], at slot p % page_size. Its
key and value have chunk j, of CHUNK elements, at j ^ slot % 8: bulk copies then need no
padding in shared memory.

Every function ignores rows and pages that are out of range."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from etc_dist.errors import GraphError
from etc_dist.functions.rms_norm import gain_offset
from etc_dist.functions.rotary import HEAD_DIMS, rotated
from etc_dist.functions.weight_layouts import two_byte
from etc_dist.ir import DeviceFunction, Extent, Operand
from etc_dist.ir.function import TENSOR

EVERY_POSITION = 2**30
"""The window of a layer without one."""
PAGE_SIZES = (16, 32, 64, 128)
CHUNK = 8
"""Elements of a chunk."""


@dataclass(frozen=True)
class PagedCache:
    """The parameters that the functions of a paged cache share.

    norm_eps: the epsilon of the RMSNorm of each query and key; None: there is none.
    has_bias: queries, keys and values get a bias before all else. score_scale: of
    attention; None: 1 / sqrt(head_dim). has_span: rows attend to a window of positions,
    which the operand `span` has. tables: rotary embeddings in cos_sin, of which `span`
    has that of the layer; more than one need has_span. gain_offset: is added to the
    gains of the norm. normalizes_rotated: the norm is that of rotated heads. has_sinks:
    the softmax of each query head has one more logit, without a value. score_cap:
    scores are at most this, by tanh."""

    head_dim: int
    page_size: int
    dtype: str = "bfloat16"
    norm_eps: float | None = None
    has_bias: bool = False
    score_scale: float | None = None
    has_span: bool = False
    tables: int = 1
    gain_offset: int = 0
    normalizes_rotated: bool = False
    has_sinks: bool = False
    score_cap: float | None = None

    def __post_init__(self) -> None:
        for name, supported in (("head_dim", HEAD_DIMS), ("page_size", PAGE_SIZES)):
            value = getattr(self, name)
            if value not in supported:
                raise GraphError(
                    f"{name} of a paged cache is not supported",
                    where=str(self),
                    wanted=" or ".join(map(str, supported)),
                    got=repr(value),
                    fix="use a model and a cache with one of these",
                )

    @property
    def element(self) -> str:
        """The dtype of the two-byte operands of CUDA bodies."""
        return two_byte(self.dtype)

    def function(
        self,
        name: str,
        body: Callable[..., None],
        reads: Mapping[str, Operand],
        writes: Mapping[str, Operand],
        constants: Mapping[str, float] | None = None,
        **fields: Any,
    ) -> DeviceFunction:
        """reads: those of `present`. constants: in addition to those of the cache."""
        tile = list(self.present(reads).values())
        num_reads = len(tile)
        return DeviceFunction(
            name=name,
            body=body,
            source=f"functions/{name}.cuh",
            lane=TENSOR,
            reads=num_reads,
            writes=len(writes),
            constants={
                "kEps": float(self.norm_eps or 0.0),
                "kHeadDim": self.head_dim,
                "kIsHalf": int(self.dtype == "float16"),
                "kNormalizes": int(self.norm_eps is not None),
                "kPageSize": self.page_size,
                **({"kHasBias": 1} if self.has_bias else {}),
                **({"kHasSpan": 1} if self.has_span else {}),
                **gain_offset(self.gain_offset),
                **({"kNormalizesRotated": 1} if self.normalizes_rotated else {}),
                **({"kTables": self.tables} if self.tables > 1 else {}),
                **(constants or {}),
            },
            tile=dict(enumerate([*tile, *writes.values()])),
            **fields,
        )

    def present(self, reads: Mapping[str, Operand]) -> dict[str, Operand]:
        """Without `gain`, that of the RMSNorm, biases, `span` and `sinks`, if there are
        none."""
        missing = {"gain": self.norm_eps is None, "span": not self.has_span}
        missing["sinks"] = not self.has_sinks
        missing |= dict.fromkeys(("bias", "v_bias"), not self.has_bias)
        return {n: operand for n, operand in reads.items() if not missing.get(n)}

    def rotated(self, heads: Any, gain: Any, cos_sin: Any) -> Any:
        """Heads [..., head_dim], normalised and rotated, in the cache's dtype."""
        result = rotated(
            heads,
            cos_sin,
            gain,
            self.norm_eps or 0.0,
            self.gain_offset,
            self.normalizes_rotated,
        )
        return result.astype(heads.dtype)

    def placed(self, heads: Any, slots: Any) -> Any:
        """Heads [rows, head_dim] with their chunks as in the cache, at these slots of a
        page; or those of the cache with their chunks in order."""
        count = self.head_dim // CHUNK
        order = np.arange(count) ^ np.asarray(slots)[:, None] % 8
        chunks = heads.reshape(-1, count, CHUNK)
        return np.take_along_axis(chunks, order[..., None], 1).reshape(heads.shape)

    def operands(self, rows: int | str) -> dict[str, Operand]:
        """What every function reads about its rows: gain [head_dim], span [2], cos_sin
        [tables * positions, head_dim] in fp32, request and position [rows] and table
        [requests, most_pages] in int32.

        span: the number of positions, up to its own, that a row attends to, and the
        first row of the layer's table in cos_sin."""
        return {
            "gain": Operand((self.head_dim,), self.element, leading=True),
            "span": Operand((2,), "int32", leading=True),
            "cos_sin": Operand((Extent(begins=0), self.head_dim), "float32"),
            "request": Operand((rows,), "int32"),
            "position": Operand((rows,), "int32", leading=True),
            "table": Operand((Extent(begins=0), Extent(whole=True)), "int32"),
        }

    def before_wait(self, first: int) -> tuple[int, ...]:
        """The positions of biases and of `operands`. first: the reads before these."""
        count = 4 + (self.norm_eps is not None) + self.has_span
        count += self.has_bias * first
        return tuple(range(first, first + count))

    def split(self, operands: Sequence[Any]) -> tuple[Any, Any]:
        """Of those before cos_sin: gain, or None, and span."""
        gain = None if self.norm_eps is None else operands[0]
        return gain, operands[-1] if self.has_span else (EVERY_POSITION, 0)

    def biased(self, heads: Any, bias: Any) -> Any:
        """The sum, rounded to the cache's dtype."""
        sums = heads.astype(np.float32) + bias.astype(np.float32)
        return sums.astype(heads.dtype)

    def pages(self, heads: int = 1, slots: Extent | None = None) -> Operand:
        """All pages of some heads; slots: of each, by default all."""
        of_page = slots or self.page_size
        sizes = (Extent(whole=True), 2, heads, of_page, self.head_dim)
        return Operand(sizes, self.element, leading=True)

    def lengths(self, cos_sin: Any, request: Any, position: Any, table: Any) -> Any:
        """For each row, the number of positions up to its own; 0 if out of range."""
        most = min(len(cos_sin) // self.tables, table.shape[1] * self.page_size)
        here = (request >= 0) & (request < len(table))
        here &= (position >= 0) & (position < most)
        return np.where(here, position + 1, 0)


def append_kv(paged: PagedCache, *, early: bool = False) -> DeviceFunction:
    """k and v [rows, head_dim] of one KV head, with biases also those of k and of v
    [head_dim], and `PagedCache.operands` of the rows -> the rows' places in the head's
    cache [pages, 2, slots, head_dim], of which a task has all slots of each page, or
    those of `part` (a coordinate or named number): equally many from slot part * slots
    on. Keys are normalized, if there is a norm, and rotated. k, v and
    cache are in the cache's dtype. early: all reads but k and v may come before the
    last wait is met."""

    def body(k: Any, v: Any, *operands: Any, part: int = 0) -> None:
        if paged.has_bias:
            (k_bias, v_bias), operands = operands[:2], operands[2:]
            k, v = paged.biased(k, k_bias), paged.biased(v, v_bias)
        *first, cos_sin, request, position, table, cache = operands
        gain, span = paged.split(first)
        lengths = paged.lengths(cos_sin, request, position, table)
        for row in np.flatnonzero(lengths):
            page, slot = divmod(int(position[row]), paged.page_size)
            number, own_slot = table[request[row], page], slot - part * cache.shape[2]
            if 0 <= number < len(cache) and 0 <= own_slot < cache.shape[2]:
                angles = cos_sin[position[row] + span[1]]
                pair = np.stack([paged.rotated(k[row], gain, angles), v[row]])
                cache[number, :, own_slot] = paged.placed(pair, [slot, slot])

    row = Operand(("rows", Extent(paged.head_dim, begins=8)), paged.element)
    bias = Operand((Extent(paged.head_dim, begins=8),), paged.element, leading=True)
    biases = {"bias": bias, "v_bias": bias}
    reads = {"k": row, "v": row, **biases, **paged.operands("rows")}
    writes = {"cache": paged.pages(slots=Extent(most=paged.page_size))}
    before = paged.before_wait(2) if early else ()
    return paged.function("append_kv", body, reads, writes, reads_before_wait=before)
