"""Attention of blocks of rows over a paged cache; CUDA half in
`kernels/functions/attend_prompt.cuh`.

`attend.py` reads the positions of each row alone. The rows of a prompt follow each
other in a request, and attend to almost the same positions.

*Unit of work.* A task has a block of rows, see `plan_shares.py`, one KV head, and up to
HEADS of its query heads. A pair of a row and a head has a query: a block has up to
PAIRS of them.

*Stages* are those of `attend`, from the first position that any row of the block
attends to. The keys and values of this step's rows are stored before.

*Computation.* Each of the eight warps has 16 pairs, the M of an mma. It reads each
stage once for all of them, and multiplies 32 positions at a time, its N. Of positions
after or before those that a row attends to, it sets the scores to minus infinity, and
passes over those that none of its pairs attends to. The queries, and the sums in fp32,
are in registers.

Sources: blocks of queries in registers, and the online softmax, as in FlashAttention-2
(Dao, 2023)."""

from __future__ import annotations

from typing import Any

from etc_dist.functions.append_kv import PagedCache
from etc_dist.functions.attend import (
    BUFFER_BYTES,
    HEADS,
    AttendedRows,
    constants_of,
    reads_of_rows,
)
from etc_dist.functions.plan_shares import EXTENT
from etc_dist.ir import DeviceFunction, Extent, Operand
from etc_dist.ir.function import COMPUTE, LOAD, PREPARE

PAIRS = 128
"""Pairs of a row and a query head in a block: 16 for each warp."""
HEAD_DIMS = (64, 128)
"""Larger heads leave a thread no registers for the sums of 16 pairs of its warp."""


def heads_of_block(group: int) -> int:
    """The query heads in a task, of `group` ones of a KV head, which are divided
    equally."""
    return -(-group // -(-group // HEADS))


def rows_of_block(group: int) -> int:
    """The most rows of a block."""
    return PAIRS // heads_of_block(group)


def attend_prompt(paged: PagedCache) -> DeviceFunction:
    """q [rows, heads * head_dim] of a block's rows and of one KV head, then the
    operands of `attend` from biases to cache, and the extents [rows, EXTENT] of the
    block's rows -> y [rows, heads * head_dim]; zeros for rows without positions.

    q, cache and y are in the cache's dtype. rows * heads is at most PAIRS."""

    def body(q: Any, *operands: Any) -> None:
        extents, y = operands[-2:]
        rows = AttendedRows(paged, q, operands[:-2], extents)
        for row, (begin, end, *_) in enumerate(extents):
            y[row] = rows.result(*rows.sums(row, begin, end))

    dim, rows = paged.head_dim, Extent(most=PAIRS, name="rows")
    columns = Extent(most=HEADS * dim, multiple=dim, begins=8, name="columns")
    of_rows = Operand((rows, columns), paged.element)
    bias = Operand((columns,), paged.element, leading=True)
    extents = Operand((rows, EXTENT), "int32", leading=True)
    reads = reads_of_rows(paged) | {"q": of_rows, "bias": bias, "extents": extents}
    return paged.function(
        "attend_prompt",
        body,
        reads,
        {"y": of_rows},
        constants_of(paged),
        gathers=(len(paged.present(reads)) - 2,),
        roles=(PREPARE, LOAD, COMPUTE),
        shared=BUFFER_BYTES[dim],
    )
