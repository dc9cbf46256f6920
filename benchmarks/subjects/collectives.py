"""The fused collectives of column- and of row-parallel layers, against NCCL and cuBLAS
one after the other; and what they share with the MLP."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from functools import cached_property, partial
from typing import Any, ClassVar

from benchmarks.device import Call, Gpu, wide
from benchmarks.harness import Subject, add_batch, add_shapes
from benchmarks.protocol import measure_shapes
from benchmarks.workload import (
    LINK_BYTES_PER_S,
    MODELS,
    TENSOR_PARALLEL,
    Rival,
    Shapes,
    Workload,
    run_steps,
)
from etc_dist import AllGatherMatmul, MatmulReduceScatter
from etc_dist.ops.operation import Operation

SMALL_MODEL, SMALL_ROWS = (512, 2048), 64


class Stepwise(Workload):
    """A workload with unfused steps; its sizes are N and K."""

    alone: Mapping[str, tuple[str, ...]] = {
        "gemm": ("gemm",),
        "collective": ("collective",),
    }
    """Steps that are timed separately, by the names of the times."""

    @staticmethod
    @abstractmethod
    def sizes_of(hidden: int, intermediate: int) -> tuple[int, int]:
        """(N, K) of one rank of a model."""

    @property
    @abstractmethod
    def moved(self) -> int:
        """Elements of the collectives; a rank sends (W - 1) / W of them."""

    steps: Any
    """steps(gpu, x, *weights, out): the unfused steps by name, in their order."""

    @cached_property
    def _unfused(self) -> tuple[dict[str, Call], Any]:
        assert isinstance(self.device, Gpu)
        (out,) = self.new_outs()
        self.device.poison(out)
        return self.steps(self.device, *self.xs, *self.weights, out), out

    def rivals(self, gpu: Gpu) -> dict[str, Rival]:
        steps, out = self._unfused
        return {"baseline": Rival([partial(run_steps, steps)], [out])}

    def parts(self, gpu: Gpu) -> dict[str, Call]:
        steps, _ = self._unfused
        return {
            name: partial(run_steps, {step: steps[step] for step in step_names})
            for name, step_names in self.alone.items()
        }

    def limits(self, gemm_ms: float) -> tuple[float, float]:
        num_bytes = self.moved * 2 * (self.world.size - 1) / self.world.size
        return gemm_ms, num_bytes / LINK_BYTES_PER_S * 1e3


class Collective(Stepwise):
    """A fused collective of x and one weight."""

    operation: ClassVar[Any]

    def w(self, rank: int) -> Any:
        return self.draw("w", rank, self.n, self.k)

    def make_weights(self) -> tuple[Any, ...]:
        return (self.w(self.world.rank),)

    def make(self, schedule: str, **options: Any) -> Operation:
        operation: Operation = self.operation(
            world=self.world, schedule=schedule, **options
        )
        return operation

    def arguments(self, number: int) -> tuple[Any, ...]:
        (w,) = self.weights
        is_kn = self.layout == "kn"
        return self.xs[number], self.device.transposed(w) if is_kn else w


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
        all_x = gpu.empty((self.m, self.k), self.dtype)
        return {
            "collective": gpu.all_gather(x, all_x),
            "gemm": gpu.matmul(all_x, w, out),
        }


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
        own_rows = slice(first, first + self.rows)
        ranks = range(self.world.size)
        return sum(wide(self.x(r)[own_rows]) @ wide(self.w(r)).T for r in ranks)

    def steps(self, gpu: Gpu, x: Any, w: Any, out: Any) -> dict[str, Call]:
        partial_sum = gpu.empty((self.m, self.n), self.dtype)
        return {
            "gemm": gpu.matmul(x, w, partial_sum),
            "collective": gpu.reduce_scatter(partial_sum, out),
        }


def subject(workload: type[Stepwise], has_batch: bool = False) -> Subject:
    """The subject of a workload at the models' sizes. has_batch: there is an option for
    `deterministic="batch"`."""
    shapes = Shapes(
        models={name: workload.sizes_of(*sizes) for name, sizes in MODELS.items()},
        small=(workload.sizes_of(*SMALL_MODEL), SMALL_ROWS),
        rows=(1024,),
    )

    def add_options(parser: Any) -> None:
        add_shapes(parser, shapes.models)
        if has_batch:
            add_batch(parser)

    title = f"Check and time {workload.op}, against NCCL and cuBLAS."
    return Subject(
        title, lambda run: measure_shapes(run, workload, shapes), add_options
    )


SUBJECTS = {
    workload.op: subject(workload)
    for workload in (AllGatherMatmulWorkload, MatmulReduceScatterWorkload)
}
