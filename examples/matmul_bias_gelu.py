"""An epilogue of your own for the library's GEMM: y = gelu(x @ w.T + bias).

launch/mpirun -n 1 examples/matmul_bias_gelu.py
"""

from importlib import import_module
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import etc_dist
from etc_dist.functions.epilogue import PER_COLUMN, epilogue
from etc_dist.ir import Graph, graph_function
from etc_dist.ops.multiply import tiles_of_dims
from etc_dist.ops.tile_model import FAMILY, choose
from etc_dist.ops.tile_order import tile_grid
from etc_dist.ops.tuning import tuning_of


@epilogue(source=Path(__file__).with_suffix(".cuh"), reads=[PER_COLUMN])
def bias_gelu(sums: Any, bias: Any, y: Any) -> None:
    v = sums + bias.astype(np.float32)
    y[...] = v / 2 * (1 + np.tanh(0.7978845608 * (v + 0.044715 * v**3)))


@graph_function
def matmul_bias_gelu(g: Graph, *, shapes: Any = FAMILY) -> None:
    """x [m, k], w [n, k], bias [n] -> y [m, n]; two dims choose the tiles."""
    m, n, k = g.dims("m n k")
    x, w = g.input("x", (m, k), "bfloat16"), g.input("w", (n, k), "bfloat16")
    bias, y = g.input("bias", (n,), "bfloat16"), g.output("y", (m, n), "bfloat16")
    tiles = tiles_of_dims(g, "", shapes, m)
    of = tile_grid(g, "", (m, n), tiles.rows, tiles.columns)
    reads, writes = [x[of.rows, :], w[of.columns, :], bias[of.columns]], [y[of[3:5]]]
    function, values = tiles.matmul("bfloat16", bias_gelu), tiles.values
    g.call(function, of.grid, reads=reads, writes=writes, order=of.order, values=values)


def main() -> None:
    with etc_dist.start() as world, etc_dist.compile(matmul_bias_gelu(1)) as program:
        xp: Any = import_module("cupy" if world.backend == "cuda" else "numpy")
        normal = np.random.default_rng(1).standard_normal
        wide = [normal(size, np.float32) for size in ((300, 256), (512, 256), (512,))]
        x, w, bias = (xp.asarray(a.astype(ml_dtypes.bfloat16)) for a in wide)
        workers, tuning = program.workers, tuning_of(world)
        choices = choose((300, 512, 256), workers, FAMILY, tuning, divides=False)[:2]
        dims = {choice.dim: choice.value for choice in choices}
        y = program.run(x=x, w=w, bias=bias, dims=dims)["y"]
        program.synchronize()
        x, w, bias = (a.astype(ml_dtypes.bfloat16).astype(np.float32) for a in wide)
        expected = np.empty((300, 512), np.float32)
        bias_gelu.half.body(x @ w.T, bias, expected)
        result = (y if xp is np else y.get()).astype(np.float32)
        error = np.linalg.norm(result - expected) / np.linalg.norm(expected)
        print(f"error against fp32: {error:.1e}")


if __name__ == "__main__":
    main()
