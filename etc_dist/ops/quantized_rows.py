"""Activations in float8: rows that are quantized in a graph before they are
multiplied."""

from __future__ import annotations

from etc_dist.functions.quantize_rows import ROWS, quantize_rows
from etc_dist.functions.scaled_weights import BLOCK, E4M3, ScaledTensor
from etc_dist.ir import Expr, Graph, Tensor, ceildiv, minimum, tile
from etc_dist.ops.multiply import RowEvents


def add_quantized_rows(
    g: Graph, name: str, x: Tensor, block: Expr
) -> tuple[ScaledTensor, RowEvents]:
    """Quantize the rows of x [m, k]. Returns codes and scales, and an event for each
    block of `block` rows, a multiple of those of a task."""
    m, k = x.shape
    codes = g.local(f"{name}x_codes", (m, k), E4M3)
    scales = g.local(f"{name}x_scales", (m, ceildiv(k, BLOCK)), "float32")
    blocks = g.let(f"{name}quantized_blocks", ceildiv(m, block))
    events = g.events(
        f"{name}quantized",
        (blocks,),
        expects=lambda i: ceildiv(minimum(block, m - i * block), ROWS),
    )
    quantized = RowEvents(events, block)
    (i,) = grid = g.grid(**{f"{name}eight_rows": ceildiv(m, ROWS)})
    rows = tile(i, ROWS), slice(None)
    g.call(
        quantize_rows(x.dtype),
        grid,
        reads=[x[rows]],
        writes=[codes[rows], scales[rows]],
        notifies=[quantized.at(i * ROWS)],
        name=f"{name}quantize_rows",
    )
    return ScaledTensor(codes, scales), quantized
