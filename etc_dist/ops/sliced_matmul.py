"""Split-K matrix multiplication, for few tiles and a large k.

Each slice of k is a task, which stores its sums in fp32. Further tasks add those of all
slices in order, so that every run has the same bits. This is a separate program: in one
program with `matmul.py`, tiles without slices took 2 to 5 % longer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from etc_dist.functions.add_partials import add_partials
from etc_dist.functions.epilogue import partial
from etc_dist.functions.tile_matmul import Tiles, TileShape, chosen
from etc_dist.ir import (
    Graph,
    ceildiv,
    graph_function,
    maximum,
    minimum,
    span,
    tile,
)
from etc_dist.ir.function import TENSOR
from etc_dist.ops.matmul_policy import (
    MOST_SLICED_ROWS,
    SLICED,
    explained,
    is_sliced,
)
from etc_dist.ops.operation import Candidate
from etc_dist.ops.tuning import Tuning, tuning_of
from etc_dist.schedule.plan import Choice
from etc_dist.world import World


@graph_function
def sliced_matmul_graph(
    g: Graph, *, dtype: str = "bfloat16", shapes: Sequence[TileShape] = SLICED
) -> None:
    """x [m, k], w [n, k] -> y [m, n] in `dtype`, on each rank its own.

    The dim `shape` selects one of `shapes`, with its number of slices, by position."""
    m, n, k, shape = g.dims("m n k shape")
    x, w = g.input("x", (m, k), dtype), g.input("w", (n, k), dtype)
    y = g.output("y", (m, n), dtype)
    slices = g.let("slices", chosen(shape, [one.slices for one in shapes]))
    tiles = Tiles(g, "tile", shape, shapes, m)
    depth = g.let("slice_k", ceildiv(ceildiv(k, slices), tiles.step) * tiles.step)
    count = g.let("slice_count", ceildiv(k, depth))
    down = g.let("down", ceildiv(m, tiles.rows))
    across = g.let("across", ceildiv(n, tiles.columns))
    sums = g.local("sums", (count, m, n), "float32")
    computed = g.events("computed", (down, across), expects=count)
    s, i, j = grid = g.grid(s=count, i=down, j=across)
    region = tile(i, tiles.rows), tile(j, tiles.columns)
    g.call(
        tiles.matmul(dtype, partial),
        grid,
        reads=[x[region[0], tile(s, depth)], w[region[1], tile(s, depth)]],
        writes=[sums[s, *region]],
        notifies=[computed[i, j]],
        values=tiles.values,
    )
    # A tile is added by as many tasks as workers computed its slices.
    pieces = g.let("pieces", 2 * slices)
    height = g.let("piece_rows", ceildiv(tiles.rows, pieces))
    i, j, q = grid = g.grid(i=down, j=across, q=pieces)
    left = minimum(height, maximum(tiles.rows - q * height, 0))
    piece = span(i * tiles.rows + q * height, left), tile(j, tiles.columns)
    g.call(
        add_partials(dtype, TENSOR),
        grid,
        reads=[sums[:, *piece]],
        writes=[y[piece]],
        waits=[computed[i, j]],
    )


def sliced_candidate(world: World) -> Candidate:
    """The program for calls that are faster with slices by a safe margin."""

    def serves(dims: Mapping[str, int]) -> bool:
        tuning = tuning_of(world)
        return is_sliced(dims["m"], dims["n"], dims["k"], tuning.workers, tuning)

    def capacity(dims: Mapping[str, int]) -> list[Mapping[str, int]]:
        most = {**dims, "m": MOST_SLICED_ROWS}
        return [{**most, "shape": number} for number in range(len(SLICED))]

    return Candidate(
        sliced_matmul_graph,
        serves=serves,
        w_layouts=("nk",),
        capacity=capacity,
        policy=choose_slices,
    )


def choose_slices(
    tuning: Tuning, w_layout: str, dims: Mapping[str, int], workers: int
) -> list[Choice]:
    """The tile shape and its number of slices."""
    sizes = dims["m"], dims["n"], dims["k"]
    return [explained("shape", sizes, workers, SLICED, tuning)]
