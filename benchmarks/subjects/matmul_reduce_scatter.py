"""GEMM + Reduce-Scatter of row-parallel layers, against cuBLAS followed by NCCL."""

from __future__ import annotations

from typing import Any

from benchmarks.device import Call, Gpu, wide
from benchmarks.subjects._stepwise import Collective, subject
from benchmarks.workload import TENSOR_PARALLEL
from etc_dist import MatmulReduceScatter


class MatmulReduceScatterWorkload(Collective):
    """x [M, K] and w [N, K] on each rank -> its M / W rows of the sum over ranks."""

    op = "matmul_reduce_scatter"
    operation = MatmulReduceScatter

    @staticmethod
    def sizes_of(hidden: int, intermediate: int) -> tuple[int, int]:
        return hidden, intermediate // TENSOR_PARALLEL

    def x(self, rank: int, number: int = 0) -> Any:
        return self.draw("x", rank, self.m, self.k)

    @property
    def out_shape(self) -> tuple[int, int]:
        return self.rows, self.n

    @property
    def moved(self) -> int:
        return self.m * self.n

    def reference(self, number: int = 0) -> Any:
        first = self.world.rank * self.rows
        own = slice(first, first + self.rows)
        ranks = range(self.world.size)
        return sum(wide(self.x(r)[own]) @ wide(self.w(r)).T for r in ranks)

    def steps(self, gpu: Gpu, x: Any, w: Any, out: Any) -> dict[str, Call]:
        partial_sum = gpu.empty((self.m, self.n), self.dtype)
        return {
            "gemm": gpu.matmul(x, w, partial_sum),
            "collective": gpu.reduce_scatter(partial_sum, out),
        }


SUBJECT = subject(MatmulReduceScatterWorkload)
