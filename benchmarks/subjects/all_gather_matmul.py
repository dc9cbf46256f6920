"""AllGather + GEMM of column-parallel layers, against NCCL followed by cuBLAS."""

from __future__ import annotations

from typing import Any

from benchmarks.device import Call, Gpu, wide
from benchmarks.subjects._stepwise import Collective, subject
from benchmarks.workload import TENSOR_PARALLEL
from etc_dist import AllGatherMatmul


class AllGatherMatmulWorkload(Collective):
    """x [M / W, K] and w [N, K] on each rank -> all ranks' rows of x times w.T; N holds
    both halves, gate and up, of a gated layer."""

    op = "all_gather_matmul"
    operation = AllGatherMatmul

    @staticmethod
    def sizes_of(hidden: int, intermediate: int) -> tuple[int, int]:
        return 2 * intermediate // TENSOR_PARALLEL, hidden

    def x(self, rank: int, number: int = 0) -> Any:
        return self.draw("x", rank, self.rows, self.k)

    @property
    def out_shape(self) -> tuple[int, int]:
        return self.m, self.n

    @property
    def moved(self) -> int:
        return self.m * self.k

    def reference(self, number: int = 0) -> Any:
        xs = [wide(self.x(rank)) for rank in range(self.world.size)]
        return self.device.xp.concatenate(xs) @ wide(self.w(self.world.rank)).T

    def steps(self, gpu: Gpu, x: Any, w: Any, out: Any) -> dict[str, Call]:
        gathered = gpu.empty((self.m, self.k), self.dtype)
        return {
            "collective": gpu.all_gather(x, gathered),
            "gemm": gpu.matmul(gathered, w, out),
        }


SUBJECT = subject(AllGatherMatmulWorkload)
