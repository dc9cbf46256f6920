"""The compiler: graph function -> plan -> source -> cubin -> program."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from itertools import count, zip_longest
from types import NoneType
from typing import Any
from weakref import WeakKeyDictionary

from etc_dist.cache import sha256
from etc_dist.codegen import Source, generate
from etc_dist.codegen.tiles import tile_errors
from etc_dist.errors import (
    ScheduleError,
    as_refusal,
    expect_type,
    warn_cpu_only,
)
from etc_dist.ir import GraphFunction
from etc_dist.ir.bodies import digest_bodies
from etc_dist.ir.graph import expect_graph
from etc_dist.messages import show_message
from etc_dist.program import Program
from etc_dist.runtime.bundle import Bundle
from etc_dist.runtime.last_run import Executor
from etc_dist.schedule import SCHEDULES, Plan
from etc_dist.settings import Settings
from etc_dist.world import World, current
from etc_dist.world.rank_errors import expect_alike


def compile(
    graph: GraphFunction,
    world: World | None = None,
    *,
    schedule: str = "static",
    trace: bool | None = None,
    bundle: Bundle | None = None,
) -> Program:
    """Compile `graph` for all ranks of `world` (default: the current one). Collective.

    The program is proved correct at each shape before its first run at that shape.

    schedule: "static" fixes the order of tasks in advance, where workers claim the next
    one by an atomic ticket if their work depends on data; "dynamic" runs tasks as they
    become ready, with the same results; "auto" is the faster one, which is static.
    trace: make a program that records its timeline (default: settings.trace).
    bundle: use its program and its proofs (`etc_dist.models.load` reads bundles).

    Raises the error of the stage that fails: ScheduleError, CodegenError, BuildError;
    TypeError for arguments of a wrong type; WorldError if the ranks have different
    graphs, bodies of device functions, numbers of workers, or versions of etc_dist."""
    world = world_or_current(world)
    settings = world.settings
    parts: list[tuple[Plan, Executor, str]] = []

    def make() -> tuple[dict[str, str], int]:
        try:
            _check(graph, world, schedule, trace)
        except TypeError as error:
            raise as_refusal(error, "the arguments of compile") from error
        with _timed("schedule", settings):
            plan = SCHEDULES[schedule](graph)
        with _timed("codegen", settings):
            tracing = settings.trace if trace is None else trace
            is_on_gpus = world.backend != "cpu"
            plan = replace(plan, has_far=is_on_gpus and world.hosts.count > 1)
            source = generate(plan, trace=tracing, check=is_on_gpus)
        if not is_on_gpus:
            for tile_error in tile_errors(graph):
                warn_cpu_only(tile_error)
        executor, code = _executor(plan, world, source, bundle)
        parts.append((plan, executor, source.text))
        facts = {
            "etc_dist": import_module(__package__).__version__,
            "graph": graph.digest(),
            "schedule": plan.schedule,
            "code": code,
        }
        return facts, executor.workers

    with world.exclusive:
        world.free_dropped()
        # An error of one rank is raised on all.
        facts, workers = zip(*world.agree(make), strict=True)
        where = f"compile({graph.name})"
        for name, (what, fix) in DIFFERENT.items():
            texts = [f"{name} {of_rank[name]}" for of_rank in facts]
            if name == "graph" and len(set(texts)) > 1:
                texts = first_difference(world.agree(graph.lines))
            expect_alike(texts, f"{what} for {graph.name}", where, fix)
        expect_alike(workers, f"numbers of workers for {graph.name}", where, WORKERS)
        plan, executor, text = parts[0]
        number = next(_numbers.setdefault(world, count(1)))
        proofs = {} if bundle is None else bundle.proofs
        return Program(plan, world, executor, text, number, proofs)


_numbers: WeakKeyDictionary[World, Iterator[int]] = WeakKeyDictionary()


def _executor(
    plan: Plan, world: World, source: Source, bundle: Bundle | None
) -> tuple[Executor, str]:
    """The plan on this world's backend, and a digest of the code that it runs."""
    if world.backend == "cpu":
        from etc_dist.runtime.cpu import CpuExecutor

        return CpuExecutor(plan, world), digest_bodies(plan.graph)
    from etc_dist.runtime.build import build
    from etc_dist.runtime.gpu import GpuExecutor

    with _timed("build", world.settings):
        cubin = build(source, world.settings, bundle=bundle)
    with _timed("load", world.settings):
        executor = GpuExecutor(plan, world, source, cubin)
    if bundle is not None:
        bundle.expect_workers(executor.workers)
    return executor, sha256(cubin.code)[:16]


def world_or_current(world: Any) -> World:
    """`world`, or the current one for None."""
    if isinstance(world, World):
        return world
    current_world = current()
    with current_world.refusing("the argument world"):
        expect_type(world, (World, NoneType), "world")
    return current_world


def _check(graph: GraphFunction, world: World, schedule: Any, trace: Any) -> None:
    expect_graph(graph)
    check_options(schedule, trace, f"compile({graph.name})")
    if graph.world_size != world.size:
        raise ScheduleError(
            f"graph {graph.name} was made for another number of ranks",
            where=f"compile({graph.name})",
            wanted=f"world_size={world.size}",
            got=f"world_size={graph.world_size}",
            fix=f"build the graph with world_size={world.size}",
        )
    if world.local_size % graph.local_size and graph.uses_peers:
        raise ScheduleError(
            f"graph {graph.name} uses the memory of ranks on other hosts",
            where=f"compile({graph.name})",
            wanted=f"{graph.local_size} ranks on each host, as it was made for",
            got=f"{world.hosts.count} hosts of {world.local_size} ranks",
            fix="start all ranks on one host, or call what runs on several "
            "(docs/hosts.md); build a graph of your own with "
            "local_size=world.local_size, and send to other hosts by push_far",
        )


def check_options(schedule: Any, trace: Any, call: str) -> None:
    """Raise TypeError or ScheduleError for options of `call` that it does not have."""
    expect_type(trace, (bool, NoneType), "trace")
    if schedule not in SCHEDULES:
        raise ScheduleError(
            "unknown schedule",
            where=call,
            wanted=" or ".join(map(repr, SCHEDULES)),
            got=repr(schedule),
            fix="choose one of these",
        )


DIFFERENT = {
    "etc_dist": ("versions of etc_dist", "install the same version on every host"),
    "graph": ("graphs", "build the graph from the same options on every rank"),
    "schedule": ("schedules", "pass the same schedule on every rank"),
    "code": (
        "bodies of device functions",
        "use the same source files, compiler and enclosed values on every rank; a body "
        "gets the number of its rank as a keyword-only parameter `rank`",
    ),
}
"""What makes a program, in the order of comparison: plural and advice."""
WORKERS = (
    "set ETC_DIST_CPU_WORKERS to one value; on GPUs use GPUs of one model, each with "
    "the same number of SMs (or MIG slices of one size)"
)
"""The advice for different numbers of workers, which a proof assumes to be equal."""


def first_difference(texts: Sequence[Sequence[str]]) -> list[str]:
    """The first line of each rank that is not alike on all, with its call."""
    lines = [*zip_longest(*texts, fillvalue="")]
    number = next(n for n, of_ranks in enumerate(lines) if len(set(of_ranks)) > 1)
    calls = [lines[n] for n in range(number) if lines[n][0].startswith("call ")]
    is_inside = any(line.startswith(" ") for line in lines[number])
    call = f"{calls[-1][0]}: " if calls and is_inside else ""
    return [call + (line.strip() or "nothing") for line in lines[number]]


@contextmanager
def _timed(stage: str, settings: Settings) -> Iterator[None]:
    start = time.perf_counter()
    yield
    if settings.timing:
        seconds = time.perf_counter() - start
        show_message(f"etc_dist: {stage} {seconds * 1e3:.1f} ms\n")
