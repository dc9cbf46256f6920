"""The compiler: graph function -> plan -> source -> cubin -> program, one line a
stage."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from etc_dist.codegen import generate
from etc_dist.errors import ScheduleError, WorldError
from etc_dist.ir import GraphFunction
from etc_dist.program import Program
from etc_dist.schedule import schedule_static
from etc_dist.settings import Settings
from etc_dist.world import World, current

_SCHEDULES = {"static": schedule_static}


def compile(
    graph: GraphFunction,
    world: World | None = None,
    *,
    schedule: str = "static",
    trace: bool | None = None,
) -> Program:
    """Compile `graph` for all ranks of `world` (default: the current one). Collective.

    The program is proved correct at each shape before its first run there. `trace`
    makes one that records its timeline (default: settings.trace). Raises the
    error of the stage that refuses: ScheduleError, CodegenError, BuildError; WorldError
    if the ranks do not hold the same graph."""
    world = world or current()
    settings = world.settings
    _check_ranks(graph, world)
    with _timed("schedule", settings):
        plan = _schedule(graph, schedule)
    with _timed("codegen", settings):
        source = generate(plan, trace=settings.trace if trace is None else trace)
    if world.backend == "cpu":
        from etc_dist.runtime.cpu import CpuExecutor

        return Program(plan, world, CpuExecutor(plan, world), source.text)
    from etc_dist.runtime.build import build
    from etc_dist.runtime.gpu import GpuExecutor

    with _timed("build", settings):
        cubin = build(source, settings)
    with _timed("load", settings):
        executor = GpuExecutor(plan, world, source, cubin)
    return Program(plan, world, executor, source.text)


def _schedule(graph: GraphFunction, schedule: str):  # type: ignore[no-untyped-def]
    if schedule not in _SCHEDULES:
        raise ScheduleError(
            "unknown schedule",
            where=f"compile({graph.name})",
            wanted=" or ".join(map(repr, _SCHEDULES)),
            got=repr(schedule),
            fix="choose one of these",
        )
    return _SCHEDULES[schedule](graph)


def _check_ranks(graph: GraphFunction, world: World) -> None:
    if graph.world_size != world.size:
        raise ScheduleError(
            f"graph {graph.name} was made for another number of ranks",
            where=f"compile({graph.name})",
            wanted=f"world_size={world.size}",
            got=f"world_size={graph.world_size}",
            fix=f"build the graph with world_size={world.size}",
        )
    digests = world.gather(graph.digest())
    if len(set(digests)) > 1:
        raise WorldError(
            f"the ranks hold different graphs {graph.name}",
            where=f"compile({graph.name})",
            wanted="the same graph on every rank",
            got=", ".join(f"rank {r}: {d}" for r, d in enumerate(digests)),
            fix="build the graph from the same options on every rank",
        )


@contextmanager
def _timed(stage: str, settings: Settings) -> Iterator[None]:
    started = time.perf_counter()
    yield
    if settings.timing:
        seconds = time.perf_counter() - started
        print(f"etc_dist: {stage} {seconds * 1e3:.1f} ms", file=sys.stderr)
