"""Split-K: a matmul of few rows and a long k, of which each task adds up one slice.

    launch/mpirun -n 1 examples/split_k.py

y = x @ w.T has few tiles, which alone would occupy few workers. So several tasks
compute a tile, each over a slice of k, in fp32. A task of the second call adds the
slices of a tile in order, as soon as they are there: each run has the same bits. The
number of slices is chosen at each run.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import ml_dtypes
import numpy as np

import etc_dist
from etc_dist.functions.add_partials import add_partials
from etc_dist.functions.epilogue import partial
from etc_dist.functions.tile_matmul import Tiles
from etc_dist.functions.tile_shape import TileShape
from etc_dist.ir import Graph, ceildiv, graph_function, tile

SHAPE = TileShape(64, 64, swapped=True)


@graph_function
def split_k(g: Graph) -> None:
    """x [m, k], w [n, k] -> y [m, n], by at most `slices` slices of k."""
    m, n, k, slices = g.dims("m n k slices")
    x, w = g.input("x", (m, k), "bfloat16"), g.input("w", (n, k), "bfloat16")
    y = g.output("y", (m, n), "bfloat16")
    tiles = Tiles(g, "tile", 0, [SHAPE])
    # A slice is a multiple of the depth of a stage, and none is empty.
    width = g.let("width", ceildiv(k, SHAPE.depth * slices) * SHAPE.depth)
    num_parts = g.let("parts", ceildiv(k, width))
    partials = g.local("partials", (num_parts, m, n), "float32")
    num_blocks, columns = ceildiv(m, tiles.rows), ceildiv(n, tiles.columns)
    part_events = g.events("added", (num_blocks, columns), expects=num_parts)

    s, i, j = grid = g.grid(s=num_parts, i=num_blocks, j=columns)
    rows, across, part = tile(i, tiles.rows), tile(j, tiles.columns), tile(s, width)
    g.call(
        tiles.matmul("bfloat16", partial),
        grid,
        reads=[x[rows, part], w[across, part]],
        writes=[partials[s, rows, across]],
        notifies=[part_events[i, j]],
        values=tiles.values,
    )
    g.call(
        add_partials("bfloat16"),
        g.grid(i=num_blocks, j=columns),
        reads=[partials[:, rows, across]],
        writes=[y[rows, across]],
        waits=[part_events[i, j]],
    )


def main() -> None:
    with (
        etc_dist.start() as world,
        etc_dist.compile(split_k(world.size), world) as program,
    ):
        xp: Any = import_module("cupy" if world.backend == "cuda" else "numpy")
        rng = np.random.default_rng(world.rank)
        wide = [rng.standard_normal((rows, 4096), np.float32) for rows in (48, 264)]
        x, w = (a.astype(ml_dtypes.bfloat16) for a in wide)
        expected = x.astype(np.float32) @ w.astype(np.float32).T
        errors = []
        for slices in (1, 6, 16):
            arrays = {"x": xp.asarray(x), "w": xp.asarray(w)}
            y = program.run(**arrays, dims={"slices": slices})["y"]
            program.synchronize()
            result = (y if xp is np else y.get()).astype(np.float32)
            error = np.linalg.norm(result - expected) / np.linalg.norm(expected)
            errors.append(float(error))
        worst = max(world.gather(max(errors)))
        if world.rank == 0:
            print(world.show())
            print(f"largest error against fp32: {worst:.1e}")
    if not worst < 5e-3:
        raise SystemExit(f"rank {world.rank}: the result is wrong")


if __name__ == "__main__":
    main()
