"""AllGather + GEMM of column-parallel layers, against NCCL followed by cuBLAS.

launch/mpirun -n 8 benchmarks/all_gather_matmul.py --models llama3-8b,llama3-70b
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.device import Call, Device
from benchmarks.harness import TENSOR_PARALLEL, Shape, Workload, main
from etc_dist import AllGatherMatmul


class AllGatherMatmulWorkload(Workload):
    """x [M / W, K] and w [N, K] on each rank -> all ranks' rows of x times w.T; N holds
    both halves, gate and up, of a gated layer."""

    name = "all_gather_matmul"
    operation = AllGatherMatmul

    def sizes(self, hidden: int, intermediate: int) -> tuple[int, int]:
        return 2 * intermediate // TENSOR_PARALLEL, hidden

    def x_shape(self, shape: Shape) -> tuple[int, int]:
        return shape.rows, shape.k

    def out_shape(self, shape: Shape) -> tuple[int, int]:
        return shape.m, shape.n

    def moved(self, shape: Shape) -> int:
        return shape.m * shape.k

    def steps(
        self, device: Device, shape: Shape, x: Any, w: Any, out: Any
    ) -> dict[str, Call]:
        gathered = device.xp.empty((shape.m, shape.k), x.dtype)
        return {
            "collective": device.all_gather(x, gathered),
            "gemm": device.matmul(gathered, w, out),
        }


if __name__ == "__main__":
    sys.exit(main(AllGatherMatmulWorkload()))
