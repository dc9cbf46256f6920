"""The time of each stage from graph to loaded program, without ranks, and of proofs."""

from __future__ import annotations

import tempfile
import time
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.decoder import PAGE_SIZE
from benchmarks.decoder_models import MODELS
from benchmarks.device import driver_version
from benchmarks.harness import Result, Run, Subject
from etc_dist.codegen import Source, generate
from etc_dist.ir import GraphFunction
from etc_dist.layers.moe_graph import moe_graph
from etc_dist.models.decoder import decoder_for
from etc_dist.models.library import MIXTURES
from etc_dist.models.rows import MOST_STOPS
from etc_dist.models.step_policy import StepPolicy
from etc_dist.ops.all_gather_matmul import all_gather_matmul_graph
from etc_dist.ops.matmul_reduce_scatter import matmul_reduce_scatter_graph
from etc_dist.runtime.build import ARCH, Cubin, build, nvrtc_version
from etc_dist.schedule import SCHEDULES, schedule_static
from etc_dist.settings import Settings
from etc_dist.verify.verify import verify

T = TypeVar("T")
MODEL, MIXTURE = "qwen3-32b", "qwen3-30b-a3b"
POSITIONS, WORKERS = 4096, 132
PROVED = ((1, 1), (8, 1), (128, 1), (8, 3))
"""Rows of a step, and steps of a launch."""


def timed(stage: Callable[[], T]) -> tuple[T, float]:
    """The result of a stage, and its milliseconds."""
    start = time.perf_counter()
    result = stage()
    return result, round((time.perf_counter() - start) * 1e3, 3)


def stages(
    name: str, graph: GraphFunction, schedule: str, settings: Settings
) -> dict[str, Any]:
    """Every stage of one graph; `settings` has an empty cache."""
    # NOTE: loading the compiler, once per process, is not counted.
    major, minor = nvrtc_version()
    plan, schedule_ms = timed(lambda: SCHEDULES[schedule](graph))
    source, generate_ms = timed(lambda: generate(plan))
    cubin, build_ms = timed(lambda: build(source, settings))
    _, cached_ms = timed(lambda: build(source, settings))
    device, load_ms = _load(source, cubin)
    return {
        "world_size": graph.world_size,
        "device": device,
        "driver": driver_version(),
        "cuda": f"{major}.{minor}",
        "backend": "cuda",
        "path": f"{plan.schedule} schedule, NVRTC, {ARCH}",
        "program": name,
        "schedule_ms": schedule_ms,
        "generate_ms": generate_ms,
        "build_ms": build_ms,
        "cached_ms": cached_ms,
        "load_ms": load_ms,
        "source_lines": len(source.text.splitlines()),
        "cubin_bytes": len(cubin.code),
        "registers": cubin.registers,
        "spill_bytes": cubin.spill_bytes,
    }


def decoder(schedule: str = "static") -> GraphFunction:
    return decoder_for(schedule, 1, MODELS[MODEL].sizes(PAGE_SIZE))


def mixtures() -> Iterator[tuple[str, GraphFunction]]:
    """The programs with the most code of those that have no model, by name."""
    mixture, _ = MIXTURES[MIXTURE]
    for world_size, parallel in ((1, "tensor"), (4, "tensor"), (4, "expert")):
        graph = moe_graph(world_size, mixture=mixture, parallel=parallel)
        name = graph.name if world_size == 1 else f"{graph.name} {parallel}"
        yield name, graph


def proof(rows: int, steps: int) -> dict[str, Any]:
    """The proof of a step at full size, of requests of up to POSITIONS."""
    config, num_pages = MODELS[MODEL], POSITIONS // PAGE_SIZE
    sizes = {"hidden": config.hidden, "inner": config.inner}
    sizes |= {"vocabulary": config.vocabulary, "all_ids": config.vocabulary}
    sizes |= {"layers": config.layers}
    sizes |= {"positions": POSITIONS, "requests": rows, "most_pages": num_pages}
    sizes |= {
        "pages": rows * num_pages,
        "rows": rows,
        "outputs": rows,
        "steps": steps,
        "stops": MOST_STOPS,
    }
    policy_dims = StepPolicy(config, WORKERS).dims(rows, POSITIONS)
    plan = schedule_static(decoder())
    verified = verify(plan, {**sizes, "samples": 0, **policy_dims}, WORKERS)
    return {
        "op": "proof",
        "world_size": 1,
        **dict.fromkeys(("device", "driver", "cuda"), "none"),
        "backend": "cpu",
        "path": f"{plan.schedule} schedule",
        "program": plan.graph.name,
        "model": MODEL,
        "rows": rows,
        "steps": steps,
        "positions": POSITIONS,
        "tasks": verified.tasks,
        "proof_ms": round(verified.seconds * 1e3, 1),
    }


def _load(source: Source, cubin: Cubin) -> tuple[str, float | None]:
    """The GPU, and the milliseconds of loading a cubin on it; None without a GPU."""
    try:
        import cupy

        properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)
        cupy.cuda.runtime.free(0)  # makes CUDA's context: not counted
    except Exception:
        return "none", None

    def load() -> object:
        module = cupy.cuda.Module()
        module.load(cubin.code)
        return module.get_function(source.entry)

    return properties["name"].decode(), timed(load)[1]


def measure(run: Run) -> Iterator[Result]:
    graphs = [
        (graph.name, graph, "static")
        for make in (matmul_reduce_scatter_graph, all_gather_matmul_graph)
        for graph in [make(run.options.world_size)]
    ]
    for schedule in ("static", "dynamic"):
        graphs += [(name, graph, schedule) for name, graph in mixtures()]
        graph = decoder(schedule)
        graphs.append((graph.name, graph, schedule))
    for name, graph, schedule in graphs:
        with tempfile.TemporaryDirectory() as cache:
            settings = replace(Settings.load(), cache=Path(cache))
            yield stages(name, graph, schedule, settings), []
    for rows, steps in PROVED:
        yield proof(rows, steps), []


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--world-size", type=int, default=8)


SUBJECTS = {
    "compile_time": Subject(
        "Time the stages of a compilation.",
        measure,
        add_options,
        op="compile",
        has_world=False,
    )
}
