"""Activations in float8: rows that are quantized in a graph before they are
multiplied, most of them while earlier rows are, or before they are sent to peers."""

from __future__ import annotations

from etc_dist.functions.push_rows import push_rows
from etc_dist.functions.push_scaled_rows import push_scaled_rows
from etc_dist.functions.quantize_rows import ROWS, quantize_rows
from etc_dist.functions.scaled_weights import BLOCK, E4M3, Place, ScaledTensor
from etc_dist.functions.tile_matmul import Tiles
from etc_dist.ir import (
    DeviceFunction,
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

Rows = Tensor | ScaledTensor
"""x [..., m, k] as elements, or as codes with scales."""


def rows_for(
    g: Graph,
    name: str,
    tiles: Tiles,
    x: Tensor,
    n: Expr,
    waits: RowEvents | None,
    *,
    is_local: bool = False,
) -> tuple[Rows, RowEvents | None]:
    """What `tiles` multiply for x [m, k], and the events of its rows: x and `waits`,
    its own, or quantized rows. n: the columns of the matmul. is_local: several ranks,
    too, have no transfers."""
    if not tiles.quantizes:
        return x, waits
    # Some rows on the tensor lane first, at once the others on the transfer lane; all
    # on the tensor lane if x has events, or ranks have transfers. A block has a
    # multiple of the rows of a task.
    m, k, block = *x.shape, tiles.rows
    codes, scales = rows = quantized_tensors(g, name, x)
    num_blocks = g.let(f"{name}quantized_blocks", ceildiv(m, block))
    is_at_once = waits is not None or (g.world_size > 1 and not is_local)
    later = wrap(0) if is_at_once else later_blocks(num_blocks, n)
    early = g.let(f"{name}early_blocks", num_blocks - later)
    start = g.let(f"{name}later_rows", minimum(m, early * block))
    # A task of one warp: about 8,192 elements.
    few = g.let(f"{name}warp_rows", _rows_of_warp(k))

    def tasks(i: Expr) -> Expr:
        in_block = minimum(block, m - i * block)
        return ceildiv(in_block, select(equal(i // early, 0), ROWS, few))

    events = g.events(f"{name}quantized", (num_blocks,), expects=tasks)
    quantized = RowEvents(events, block)
    lanes = [(TENSOR, wrap(0), start, wrap(ROWS)), (TRANSFER, start, m, few)]
    for lane, first, end, size in lanes[:1] if is_at_once else lanes:
        call = f"{name}quantize_rows" if lane == TENSOR else f"{name}quantize_later"
        (i,) = grid = g.grid(**{f"{call}_task": ceildiv(end - first, size)})
        region = span(first + i * size, size), slice(None)
        g.call(
            quantize_rows(x.dtype, lane),
            grid,
            reads=[x[region]],
            writes=[codes[region], scales[region]],
            waits=[] if waits is None else [waits.at(first + i * size)],
            notifies=[quantized.at(first + i * size)],
            name=call,
        )
    return rows, quantized


def rank_rows_for(
    g: Graph, name: str, tiles: Tiles, x: Tensor, waits: RowEvents | None
) -> tuple[Rows, RowEvents | None]:
    """The same for x [world, rows, k], of which a tile has rows of one rank, and events
    [world, blocks]. All rows are quantized on the tensor lane, this rank's first."""
    if not tiles.quantizes:
        return x, waits
    (world, m, _), block = x.shape, tiles.rows
    codes, scales = rows = quantized_tensors(g, name, x)
    num_blocks = g.let(f"{name}quantized_blocks", ceildiv(m, block))

    def tasks(_: Expr, i: Expr) -> Expr:
        return ceildiv(minimum(block, m - i * block), ROWS)

    events = g.events(f"{name}quantized", (world, num_blocks), expects=tasks)
    quantized, call = RowEvents(events, block), f"{name}quantize_rows"
    axes = {f"{call}_rank": world, f"{call}_task": ceildiv(m, ROWS)}
    p, i = grid = g.grid(**axes)
    source, row = (g.rank + p) % world, i * ROWS
    region = source, span(row, minimum(ROWS, m - row)), slice(None)
    g.call(
        quantize_rows(x.dtype),
        grid,
        reads=[x[region]],
        writes=[codes[region], scales[region]],
        waits=[] if waits is None else [waits.of(source).at(row)],
        notifies=[quantized.of(source).at(row)],
        name=call,
    )
    return rows, quantized


def quantized_tensors(g: Graph, name: str, x: Tensor) -> ScaledTensor:
    """Tensors of this rank for the codes of x and their scales."""
    *axes, k = x.shape
    codes = g.local(f"{name}x_codes", x.shape, E4M3)
    scales = g.local(f"{name}x_scales", (*axes, ceildiv(k, BLOCK)), "float32")
    return ScaledTensor(codes, scales)


def row_tensors(x: Rows) -> tuple[Tensor, ...]:
    """The tensors of rows: one, or codes and scales."""
    return (x.codes, x.scales) if isinstance(x, ScaledTensor) else (x,)


def gathered_tensors(g: Graph, name: str, stack: Place, x: Rows) -> Rows:
    """Symmetric tensors [*stack, k] for the rows of all ranks: for codes and scales, if
    x has them."""
    *_, k = row_tensors(x)[0].shape
    if not isinstance(x, ScaledTensor):
        return g.symmetric(name, (*stack, k), x.dtype)
    scales = g.symmetric(f"{name}_scales", (*stack, ceildiv(k, BLOCK)), "float32")
    return ScaledTensor(g.symmetric(name, (*stack, k), E4M3), scales)


def push_of(x: Rows) -> DeviceFunction:
    """The device function that sends `row_tensors(x)`."""
    return push_scaled_rows() if isinstance(x, ScaledTensor) else push_rows()


def _rows_of_warp(k: Expr) -> Expr:
    """1, 2, 4 or 8: they divide those of a block."""
    rows = wrap(1)
    for size in (2, 4, 8):
        rows = select(equal((k - 1) * size // 8192, 0), size, rows)
    return rows
