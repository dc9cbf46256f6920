"""Workloads with unfused steps on GPUs: the fused collectives and the MLP."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from functools import cached_property, partial
from typing import Any, ClassVar

from benchmarks import harness
from benchmarks.device import Call, Gpu
from benchmarks.workload import LINK_BYTES_PER_S, MODELS, Rival, Workload, run
from etc_dist.ops.operation import Operation

ROWS = (1024,)
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

    @property
    def m(self) -> int:
        return self.rows * self.world.size

    @property
    def n(self) -> int:
        return self.sizes[0]

    @property
    def k(self) -> int:
        return self.sizes[1]

    def fields(self) -> dict[str, Any]:
        return {"M": self.m, "N": self.n, "K": self.k}

    @cached_property
    def _unfused(self) -> tuple[dict[str, Call], Any]:
        assert isinstance(self.device, Gpu)
        out = self.device.empty(self.out_shape, self.dtype)
        self.device.poison(out)
        return self.steps(self.device, *self.xs, *self.weights, out), out

    def rivals(self, gpu: Gpu) -> dict[str, Rival]:
        steps, out = self._unfused
        return {"baseline": Rival([partial(run, steps)], [out])}

    def parts(self, gpu: Gpu) -> dict[str, Call]:
        steps, _ = self._unfused
        return {
            name: partial(run, {step: steps[step] for step in chosen})
            for name, chosen in self.alone.items()
        }

    def limits(self, gemm_ms: float) -> tuple[float, float]:
        sent = self.moved * 2 * (self.world.size - 1) / self.world.size
        return gemm_ms, sent / LINK_BYTES_PER_S * 1e3


class Collective(Stepwise):
    """A fused collective of x and one weight."""

    operation: ClassVar[Any]

    def w(self, rank: int) -> Any:
        return self.draw("w", rank, self.n, self.k)

    def make_weights(self) -> tuple[Any, ...]:
        return (self.w(self.world.rank),)

    def make(self, schedule: str) -> Operation:
        made: Operation = self.operation(
            world=self.world,
            schedule=schedule,
        )
        return made

    def call(self, operation: Any, number: int) -> Call:
        (w,) = self.weights
        if self.layout == "kn":
            w = self.device.transposed(w)
        return partial(operation, self.xs[number], w, self.outs[number])


def main(workload: type[Stepwise], with_batch: bool = False) -> int:
    """The command line of one workload's file; the exit code. with_batch: there is an
    option for `deterministic="batch"`."""
    title = f"Check and time {workload.op}."
    parser = harness.shapes_parser(title, workload.op, MODELS)
    if with_batch:
        harness.add_batch(parser)
    options = parser.parse_args()
    models = {name: workload.sizes_of(*sizes) for name, sizes in MODELS.items()}
    small = workload.sizes_of(*SMALL_MODEL), SMALL_ROWS
    device = harness.begin(options.cpu)
    return harness.main(device, workload, models, small, ROWS, options)
