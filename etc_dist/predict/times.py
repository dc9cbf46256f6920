"""How long the tasks of a plan take: by a trace of a run, or by a model of the GPU."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from statistics import fmean

from etc_dist.errors import ArgumentError
from etc_dist.functions.matmul import TILE
from etc_dist.functions.tile_matmul import TileShape
from etc_dist.ir.function import COMPUTE, FORWARD, TENSOR
from etc_dist.ops.matmul_policy import work_of
from etc_dist.ops.tuning import Constants
from etc_dist.predict.simulation import Times
from etc_dist.predict.tasks import OWN, CallTasks, RankTasks
from etc_dist.runtime.trace import FORWARDED, Trace

WARP_BYTES_PER_US, TASK_US = 3000.0, 1.0
"""Of a warp that copies or adds, and the fixed cost of its task: both assumed."""


def traced_times(tasks: RankTasks, trace: Trace) -> Times:
    """The mean times of a trace of the same graph with the same sizes of tiles; the
    number of hosts may be another one. ArgumentError for a trace of another plan."""
    found: dict[str, list[int]] = defaultdict(list)
    for record in trace.records:
        found[record.call].append(record.end_ns - record.start_ns)
    us = {name: fmean(times) / 1e3 for name, times in found.items()}
    wanted = {c.call.name for c in tasks.calls if c.count and not c.idle.all()}
    forwards = {c.call.name + FORWARDED for c in tasks.calls if _is_forwarded(c)}
    known = {c.call.name for c in tasks.calls}
    known |= {name + FORWARDED for name in known}
    missing, foreign = (wanted | forwards) - us.keys(), us.keys() - known
    if missing or foreign:
        lists = (
            ("no " + ", ".join(sorted(missing))) * bool(missing),
            ", ".join(sorted(foreign)),
        )
        raise ArgumentError(
            "the trace is of another plan",
            where=f"graph {tasks.plan.graph.name}, {tasks.plan.graph.world_size} ranks",
            wanted=f"times of {', '.join(sorted(wanted | forwards))}",
            got="; ".join(filter(None, lists)),
            fix="trace this graph, on several hosts, with as many ranks of a host",
        )
    return Times(
        {c.call.name: us.get(c.call.name, 0.0) for c in tasks.calls},
        {name.removesuffix(FORWARDED): us[name] for name in forwards},
    )


def model_times(tasks: RankTasks, constants: Constants) -> Times:
    """Times by the model of matmuls on tiles of 256 x 256, and by the bytes that other
    tasks read. ArgumentError for other tasks of the tensor lane."""
    times, forwards = {}, {}
    for of_call in tasks.calls:
        call, function = of_call.call, of_call.call.function
        env = tasks.plan.graph.environment(tasks.dims, 0)
        if function.lane == TENSOR:
            if COMPUTE not in function.roles or function.cluster != 2:
                raise ArgumentError(
                    f"the time of call {call.name} is not known",
                    where=f"graph {tasks.plan.graph.name}",
                    wanted="matmuls on tiles of 256 x 256 on the tensor lane",
                    got=str(function),
                    fix="give a trace of a run, by traced_times() or --trace",
                )
            depth = int(call.reads[0].tensor.shape[-1].evaluate(env))
            work = work_of(TileShape(TILE, TILE, "rows"), TILE, TILE, depth, 2)
            times[call.name] = work.stages * max(work.stage_us(constants))
            if FORWARD in function.roles:
                tile = TILE * TILE * call.writes[0].tensor.itemsize
                forwards[call.name] = TASK_US + tile / 4 / WARP_BYTES_PER_US
        elif function.far:
            times[call.name] = TASK_US
        else:
            times[call.name] = TASK_US + of_call.read_bytes / WARP_BYTES_PER_US
    return Times(times, forwards)


def _is_forwarded(tasks: CallTasks) -> bool:
    forwards = FORWARD in tasks.call.function.roles
    return forwards and bool((tasks.target != OWN).any())


def show_times(times: Times) -> str:
    """A line for each call."""
    both: Mapping[str, float] = {
        **times.tasks,
        **{name + FORWARDED: us for name, us in times.forwards.items()},
    }
    width = max(map(len, both), default=0)
    return "".join(f"  {name:{width}}  {us:8.2f} us\n" for name, us in both.items())
