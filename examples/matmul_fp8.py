"""A GEMM whose result is quantised to fp8, with a scale for each row and strip.

launch/mpirun -n 1 examples/matmul_fp8.py
"""

from importlib import import_module
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import etc_dist
from etc_dist.functions.epilogue import PER_ROW, epilogue
from etc_dist.functions.tile_matmul import Tiles
from etc_dist.functions.tile_shape import TileShape
from etc_dist.ir import Graph, ceildiv, graph_function, tile
from etc_dist.ops.tile_order import tile_grid

FP8, SHAPE = "float8_e4m3fn", TileShape(128, 128)
SOURCE = Path(__file__).with_suffix(".cuh")


@epilogue(source=SOURCE, writes=[PER_ROW], dtype=FP8)
def quantise(sums: Any, y: Any, scales: Any) -> None:
    scales[...] = np.maximum(np.abs(sums).max(axis=1), np.float32(1e-30)) / 448
    y[...] = (sums / scales[:, None]).astype(y.dtype)


@graph_function
def matmul_fp8(g: Graph, *, shape: TileShape = SHAPE) -> None:
    """x [m, k], w [n, k] -> y [m, n], scales [strips of n, m]."""
    m, n, k = g.dims("m n k")
    x, w = g.input("x", (m, k), "bfloat16"), g.input("w", (n, k), "bfloat16")
    y, tiles = g.output("y", (m, n), FP8), Tiles(g, "tile", 0, [shape])
    num_strips = ceildiv(n, tiles.strip_columns())
    scales = g.output("scales", (num_strips, m), "float32")
    of = tile_grid(g, "", (m, n), tiles.rows, tiles.columns)
    reads = [x[of.rows, :], w[of.columns, :]]
    writes = [y[of[3:5]], scales[tile(of.grid[1], tiles.strips()), of.rows]]
    function, values = tiles.matmul("bfloat16", quantise), tiles.values
    g.call(function, of.grid, reads=reads, writes=writes, order=of.order, values=values)


def main() -> None:
    with etc_dist.start() as world, etc_dist.compile(matmul_fp8(1)) as program:
        xp: Any = import_module("cupy" if world.backend == "cuda" else "numpy")
        normal, bf16 = np.random.default_rng(1).standard_normal, ml_dtypes.bfloat16
        x, w = (xp.asarray(normal((r, 256)).astype(bf16)) for r in (300, 512))
        y, scales = xp.empty((300, 512), np.uint8), xp.empty((4, 300), np.float32)
        program.run(x=x, w=w, y=y, scales=scales)
        program.synchronize()
        x, w, y, scales = (a if xp is np else a.get() for a in (x, w, y, scales))
        whole = x.astype(np.float32) @ w.astype(np.float32).T
        result = y.view(FP8).astype(np.float32) * scales.T.repeat(128, axis=1)
        print(f"largest error: {abs(result - whole).max() / abs(whole).max():.3f}")


if __name__ == "__main__":
    main()
