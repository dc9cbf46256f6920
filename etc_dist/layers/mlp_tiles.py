"""The graph of the dense MLP in which every rank computes the rows of all ranks. The
number of rows selects the tile shapes."""

from __future__ import annotations

from collections.abc import Sequence

from etc_dist.functions.epilogue import swiglu
from etc_dist.functions.tile_matmul import TileShape
from etc_dist.ir import Graph, graph_function
from etc_dist.layers.mlp_steps import add_tensors
from etc_dist.ops.few_rows import SUMMED, RowBlocks
from etc_dist.ops.matmul_policy import BLOCK, SHAPES


@graph_function
def mlp_tiles_graph(
    g: Graph,
    *,
    dtype: str = "bfloat16",
    shapes: Sequence[TileShape] = SHAPES,
    block: int = BLOCK,
    summed: int = SUMMED,
) -> None:
    """x [rows, hidden] on each rank -> y [rows, hidden], the same rows.

    gate, up [inner, hidden] and down [hidden, inner] are a rank's shard of the weights.
    Every rank gathers the rows of all, multiplies them by gate and up into activations,
    and these by down. Once all tiles of a row are computed, the rank sends its partial
    sum to the row's owner, which adds those of all ranks in fp32. A single rank reads x
    and writes y directly.

    The dims `gate_up_shape` and `down_shape` select the tiles of the two GEMMs, by
    position in `shapes`.
    """
    x, y, (gate, up), down = add_tensors(g, dtype)
    rows, inner = x.shape[0], down.shape[1]
    gate_up_shape, down_shape = g.dims("gate_up_shape down_shape")
    tokens = g.let("tokens", g.world_size * rows)
    blocks = RowBlocks(g, tokens, block)
    all_x, arrived = blocks.gather(x)
    active = g.local("active", (tokens, inner), dtype)
    tiles = blocks.tiles("gate_up", gate_up_shape, shapes)
    activated = blocks.multiply(
        "gate_up",
        tiles,
        tiles.matmul(dtype, swiglu),
        (all_x, [gate, up], active),
        tiles.half_columns(),
        arrived,
        "activated",
    )
    tiles = blocks.tiles("down", down_shape, shapes)
    blocks.multiply_and_return("down", tiles, (active, down, y), activated, summed)
