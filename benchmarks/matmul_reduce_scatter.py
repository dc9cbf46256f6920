"""GEMM + Reduce-Scatter of row-parallel layers, against cuBLAS followed by NCCL.

launch/mpirun -n 8 benchmarks/matmul_reduce_scatter.py --models llama3-8b,llama3-70b
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.device import Call, Device
from benchmarks.harness import TENSOR_PARALLEL, Shape, Workload, main
from etc_dist import MatmulReduceScatter


class MatmulReduceScatterWorkload(Workload):
    """x [M, K] and w [N, K] on each rank -> its M / W rows of the sum over ranks."""

    name = "matmul_reduce_scatter"
    operation = MatmulReduceScatter

    def sizes(self, hidden: int, intermediate: int) -> tuple[int, int]:
        return hidden, intermediate // TENSOR_PARALLEL

    def x_shape(self, shape: Shape) -> tuple[int, int]:
        return shape.m, shape.k

    def out_shape(self, shape: Shape) -> tuple[int, int]:
        return shape.rows, shape.n

    def moved(self, shape: Shape) -> int:
        return shape.m * shape.n

    def steps(
        self, device: Device, shape: Shape, x: Any, w: Any, out: Any
    ) -> dict[str, Call]:
        partial = device.xp.empty((shape.m, shape.n), x.dtype)
        return {
            "gemm": device.matmul(x, w, partial),
            "collective": device.reduce_scatter(partial, out),
        }


if __name__ == "__main__":
    sys.exit(main(MatmulReduceScatterWorkload()))
