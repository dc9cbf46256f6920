"""Activations in float8: rows that are quantized in a graph before they are
multiplied, most of them while earlier rows are."""

from __future__ import annotations

from etc_dist.functions.quantize_rows import ROWS, quantize_rows
from etc_dist.functions.scaled_weights import BLOCK, E4M3, ScaledTensor
from etc_dist.functions.tile_matmul import Tiles
from etc_dist.ir import (
    Expr,
    Graph,
    Tensor,
    ceildiv,
    equal,
    minimum,
    select,
    span,
)
from etc_dist.ir.expr import wrap
from etc_dist.ir.function import TENSOR, TRANSFER
from etc_dist.ops.multiply import RowEvents
from etc_dist.ops.tile_order import later_blocks


def rows_for(
    g: Graph, name: str, tiles: Tiles, x: Tensor, n: Expr, waits: RowEvents | None
) -> tuple[Tensor | ScaledTensor, RowEvents | None]:
    """What `tiles` multiply for x [m, k], and the events of its rows: x and `waits`,
    its own, or quantized rows. n: the columns of the matmul."""
    if not tiles.quantizes:
        return x, waits
    # Some rows on the tensor lane first, at once the others on the transfer lane; all
    # on the tensor lane if x has events. A block has a multiple of the rows of a task.
    m, k, block = *x.shape, tiles.rows
    codes = g.local(f"{name}x_codes", (m, k), E4M3)
    scales = g.local(f"{name}x_scales", (m, ceildiv(k, BLOCK)), "float32")
    num_blocks = g.let(f"{name}quantized_blocks", ceildiv(m, block))
    later = wrap(0) if waits is not None else later_blocks(num_blocks, n)
    early = g.let(f"{name}early_blocks", num_blocks - later)
    start = g.let(f"{name}later_rows", minimum(m, early * block))
    # A task of one warp: about 8,192 elements.
    few = g.let(f"{name}few_rows", _rows_of_warp(k))

    def tasks(i: Expr) -> Expr:
        rows = minimum(block, m - i * block)
        return ceildiv(rows, select(equal(i // early, 0), ROWS, few))

    events = g.events(f"{name}quantized", (num_blocks,), expects=tasks)
    quantized = RowEvents(events, block)
    lanes = [(TENSOR, wrap(0), start, wrap(ROWS)), (TRANSFER, start, m, few)]
    for lane, first, end, size in lanes if waits is None else lanes[:1]:
        call = f"{name}quantize_rows" if lane == TENSOR else f"{name}quantize_later"
        (i,) = grid = g.grid(**{f"{call}_task": ceildiv(end - first, size)})
        rows = span(first + i * size, size), slice(None)
        g.call(
            quantize_rows(x.dtype, lane),
            grid,
            reads=[x[rows]],
            writes=[codes[rows], scales[rows]],
            waits=[] if waits is None else [waits.at(first + i * size)],
            notifies=[quantized.at(first + i * size)],
            name=call,
        )
    return ScaledTensor(codes, scales), quantized


def _rows_of_warp(k: Expr) -> Expr:
    """1, 2, 4 or 8: they divide those of a block."""
    rows = wrap(1)
    for size in (2, 4, 8):
        rows = select(equal((k - 1) * size // 8192, 0), size, rows)
    return rows
