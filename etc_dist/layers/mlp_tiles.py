"""The graph of the dense MLP in which every rank computes the rows of all ranks. The
number of rows selects the tiles."""

from __future__ import annotations

from collections.abc import Sequence

from etc_dist.functions.epilogue import swiglu
from etc_dist.functions.tile_shape import TileShape
from etc_dist.ir import Graph, equal, graph_function, select
from etc_dist.layers.mlp_steps import add_tensors
from etc_dist.ops.few_rows import FEW, gather_rows, multiply_and_return
from etc_dist.ops.multiply import TiledMatmul, tiles_of_dims
from etc_dist.ops.quantized_rows import rows_for
from etc_dist.ops.tile_model import FAMILY


@graph_function
def mlp_tiles_graph(
    g: Graph,
    *,
    dtype: str = "bfloat16",
    w_layout: str = "nk",
    shapes: Sequence[TileShape] = FAMILY,
    few: int = FEW,
) -> None:
    """x [rows, hidden] on each rank -> y [rows, hidden], the same rows.

    gate, up [inner, hidden] and down [hidden, inner] are a rank's shard of the weights.
    Every rank gathers the rows of all, multiplies them by gate and up into activations,
    and these by down. Once the tiles of some columns are computed, the rank sends its
    partial sums of rows to their owners, which add those of all ranks in fp32. A single
    rank reads x and writes y directly.

    Dims whose names begin with `gate_up_` and `down_` select the tiles of the two
    GEMMs: see `tiles_of_dims` and `TiledMatmul`. Tiles of down wait for the activations
    of their rows, or of all rows if the two GEMMs divide the rows in different ways.
    With a layout of float8 activations, x is quantized before it is gathered, and the
    activations before they are multiplied.
    """
    x, y, weights, down = add_tensors(g, dtype, w_layout)
    rows, inner = x.shape[0], down.shape[1]
    tokens = g.let("tokens", g.world_size * rows)
    tiles, down_tiles = (
        tiles_of_dims(g, name, shapes, tokens, w_layout)
        for name in ("gate_up_", "down_")
    )
    own_rows, own_events = rows_for(g, "gate_up_", tiles, x, 2 * inner, None)
    all_x, x_events = gather_rows(g, own_rows, tokens, tiles.rows, own_events)
    active = g.local("active", (tokens, inner), dtype)
    gate_up = TiledMatmul(g, "gate_up_", tiles, dtype, all_x, weights, active, swiglu)
    is_alike = equal(tiles.rows, down_tiles.rows)
    block = g.let("activated_rows", select(is_alike, tiles.rows, tokens))
    activated = gate_up.complete("activated", block)
    gate_up.add(x_events)
    hidden = x.shape[1]
    rows_of_active, activated_rows = rows_for(
        g, "down_", down_tiles, active, hidden, activated
    )
    operands = rows_of_active, down, y
    multiply_and_return(g, "down_", down_tiles, operands, activated_rows, few)
