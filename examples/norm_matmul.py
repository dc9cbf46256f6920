"""A device function of your own in front of the library's GEMM: an RMSNorm.

    launch/mpirun -n 2 examples/norm_matmul.py

y = (x / rms(x) * gain) @ w.T on each rank by itself, in one kernel. A row block of the
GEMM begins once its own rows are normalised. The CUDA body is in norm_matmul.cuh.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import etc_dist
from etc_dist.functions.tile_matmul import Tiles
from etc_dist.functions.tile_shape import TileShape
from etc_dist.ir import Graph, ceildiv, device_function, graph_function, minimum, tile

CUDA = Path(__file__).with_suffix(".cuh")
ROWS = 16
"""Rows of a `rms_norm` task."""
SHAPE = TileShape(128, 128)
"""The tile of a task of the GEMM, which one worker runs."""
EPS = 1e-6


@device_function(source=CUDA, reads=2, writes=1, constants={"kEps": EPS})
def rms_norm(x: Any, gain: Any, y: Any) -> None:
    x = x.astype(np.float32)
    mean = (x * x).mean(axis=1, keepdims=True)
    y[...] = x / np.sqrt(mean + np.float32(EPS)) * gain.astype(np.float32)


@graph_function
def norm_matmul(g: Graph) -> None:
    """x [rows, k], gain [k], w [n, k] -> y [rows, n]."""
    rows, n, k = g.dims("rows n k")
    tiles = Tiles(g, "tile", 0, [SHAPE])
    num_blocks, num_row_tiles = ceildiv(rows, ROWS), ceildiv(rows, tiles.rows)
    x = g.input("x", (rows, k), "bfloat16")
    gain = g.input("gain", (k,), "bfloat16")
    w = g.input("w", (n, k), "bfloat16")
    y = g.output("y", (rows, n), "bfloat16")
    normed = g.local("normed", (rows, k), "bfloat16")
    of_tile = SHAPE.rows // ROWS
    ready = g.events(
        "ready",
        (num_row_tiles,),
        expects=lambda i: minimum(of_tile, num_blocks - i * of_tile),
    )

    (b,) = grid = g.grid(b=num_blocks)
    g.call(
        rms_norm,
        grid,
        reads=[x[tile(b, ROWS), :], gain[:]],
        writes=[normed[tile(b, ROWS), :]],
        notifies=[ready[b // of_tile]],
    )
    i, j = grid = g.grid(i=num_row_tiles, j=ceildiv(n, tiles.columns))
    of_rows, columns = tile(i, tiles.rows), tile(j, tiles.columns)
    g.call(
        tiles.matmul("bfloat16"),
        grid,
        values=tiles.values,
        reads=[normed[of_rows, :], w[columns, :]],
        writes=[y[of_rows, columns]],
        waits=[ready[i]],
    )


def main() -> None:
    with (
        etc_dist.start() as world,
        etc_dist.compile(norm_matmul(world.size), world) as program,
    ):
        if world.backend == "cuda":
            import cupy as xp
        else:
            xp = np
        rng = np.random.default_rng(world.rank)
        shapes = {"x": (300, 128), "gain": (128,), "w": (264, 128)}
        whole = {
            n: rng.integers(-4, 5, s).astype(np.float32) for n, s in shapes.items()
        }
        arrays = {n: xp.asarray(a.astype(ml_dtypes.bfloat16)) for n, a in whole.items()}
        y = program.run(**arrays)["y"]
        program.synchronize()

        x, gain, w = whole.values()
        normed = x / np.sqrt((x * x).mean(axis=1, keepdims=True) + EPS) * gain
        expected = xp.asarray(normed @ w.T)
        difference = y.astype(np.float32) - expected
        error = float(xp.linalg.norm(difference) / xp.linalg.norm(expected))
        rank_errors = world.gather(error)
        if world.rank == 0:
            print(world.show())
            print(f"largest error against fp32: {max(rank_errors):.1e}")
    if error > 5e-3:
        raise SystemExit(f"rank {world.rank}: the result is wrong")


if __name__ == "__main__":
    main()
