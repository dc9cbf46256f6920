"""How long the tasks of a plan take: by a trace of a run, or by a model of the GPU."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from statistics import fmean

from etc_dist.errors import ArgumentError
from etc_dist.functions.scaled_weights import E4M3
from etc_dist.functions.tile_shape import TileShape
from etc_dist.ir.function import TENSOR
from etc_dist.ir.graph import GraphFunction
from etc_dist.ops.tile_model import Tiling, work_of
from etc_dist.ops.tuning import TileConstants, Tuning
from etc_dist.runtime.cpu.task import Task
from etc_dist.runtime.trace import Trace

WARP_BYTES_PER_US, TASK_US = 3000.0, 1.0
"""Of a warp that copies or adds, and the fixed cost of its task: both assumed."""


@dataclass(frozen=True)
class TracedTimes:
    """The mean times of a trace of the same graph with the same sizes of tiles; the
    number of hosts may be another one. us: microseconds by call. Times of other calls
    are refused with an ArgumentError."""

    graph: GraphFunction
    us: Mapping[str, float]

    @classmethod
    def of(cls, graph: GraphFunction, trace: Trace) -> TracedTimes:
        """The means of `trace`; ArgumentError if it has a call that `graph` lacks."""
        spans: dict[str, list[int]] = defaultdict(list)
        for record in trace.records:
            spans[record.call].append(record.end_ns - record.start_ns)
        times = cls(graph, {name: fmean(ns) / 1e3 for name, ns in spans.items()})
        foreign = times.us.keys() - {call.name for call in graph.calls}
        if foreign:
            raise times._refusal(", ".join(sorted(foreign)))
        return times

    def task_us(self, task: Task) -> float:
        """Microseconds of any task of its call."""
        name = task.call.name
        if name not in self.us:
            raise self._refusal(f"no time of {name}")
        return self.us[name]

    def _refusal(self, got: str) -> ArgumentError:
        return ArgumentError(
            "the trace is of another plan",
            where=f"graph {self.graph.name}, {self.graph.world_size} ranks",
            wanted=f"times of {', '.join(call.name for call in self.graph.calls)}",
            got=got,
            fix="trace this graph, on several hosts, with as many ranks of a host",
        )


@dataclass(frozen=True)
class ModelTimes:
    """Times by the models of matmuls on tiles, and by the bytes that other tasks read.
    ArgumentError for other tasks of the tensor lane."""

    tuning: Tuning

    def task_us(self, task: Task) -> float:
        """Microseconds of a matmul, or of a warp that reads the task's bytes."""
        function = task.call.function
        if function.lane == TENSOR:
            if function.name == "sum_tile_parts":
                nbytes = sum(read.nbytes for read in task.reads)
                return TASK_US + nbytes / self.tuning.tiles.sums_bytes_per_us
            if function.name == "tile_matmul":
                packed = dict(task.call.values)["packed_tile"].evaluate(task.env)
                x, w, *_ = task.reads
                is_float8 = x.tensor.dtype == E4M3
                is_scaled = w.tensor.dtype == E4M3 and not is_float8
                shape = TileShape.of(int(packed), scaled=is_scaled, float8=is_float8)
                return _tile_us(shape, x.shape[-1], self.tuning.tiles)
            if function.name == "quantize_rows":
                nbytes = sum(access.nbytes for access in (*task.reads, *task.writes))
                return TASK_US + nbytes / self.tuning.tiles.worker_bytes_per_us
            raise ArgumentError(
                f"the time of call {task.call.name} is not known",
                where=task.where,
                wanted="matmuls on tiles of one worker on the tensor lane",
                got=str(function),
                fix="give the times of a traced run (--trace)",
            )
        nbytes = 0 if function.far else sum(read.nbytes for read in task.reads)
        return TASK_US + nbytes / WARP_BYTES_PER_US


@cache
def _tile_us(shape: TileShape, depth: int, constants: TileConstants) -> float:
    """Of a tile of one worker, or of a part of its k."""
    sizes = shape.rows, shape.columns, depth
    work = work_of(shape, Tiling(0, shape.columns), sizes, 1)
    us = replace(work, quantized=0).us(constants)  # other tasks quantize x
    return us - constants.call_us
