"""The collectives and the MLP on small tiles, of which small shapes have many."""

from __future__ import annotations

from typing import Any

from etc_dist.functions.tile_shape import TileShape
from etc_dist.ir import GraphFunction
from etc_dist.layers.mlp import mlp_graph
from etc_dist.ops.all_gather_matmul import all_gather_matmul_graph
from etc_dist.ops.matmul_reduce_scatter import matmul_reduce_scatter_graph

SMALL = (TileShape(8, 64, swapped=True),)


def scatter(world: int, **options: Any) -> GraphFunction:
    return matmul_reduce_scatter_graph(world, shapes=SMALL, **options)


def gather(world: int, **options: Any) -> GraphFunction:
    options = {"packet_bytes": 64, **options}
    return all_gather_matmul_graph(world, shapes=SMALL, **options)


def small_mlp(world: int, **options: Any) -> GraphFunction:
    return mlp_graph(world, shapes=SMALL, **{"packet_bytes": 64, **options})


def tile_dims(
    graph: GraphFunction, columns: int = 16, split: int = 0, parts: int = 1
) -> dict[str, int]:
    """The dims of a graph that select tiles: of the first shape, of so many columns,
    of which the last `split` columns of tiles are in `parts` parts of k. Gated tiles
    have all columns of the shape."""
    values = {
        "gate_up_column_groups": SMALL[0].columns // 8,
        "shape": 0,
        "column_groups": columns // 8,
        "split_tile_columns": split,
        "parts": parts,
    }
    names = [dim.name for dim in graph.dims]
    pairs = [(n, v) for n in names for end, v in values.items() if n.endswith(end)]
    return dict(reversed(pairs))
