"""The program of a model: compiled and proved without a GPU."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Any

from etc_dist.models.model_bundle import WORKERS
from etc_dist.models.setup import ModelSetup
from etc_dist.models.step_policy import padded
from etc_dist.runtime.build import ARCH, report
from etc_dist.schedule import SCHEDULES
from etc_dist.settings import Settings
from etc_dist.verify.proof import prove


def compile_steps(setup: ModelSetup) -> tuple[str, bool]:
    """Compile the program for an H200; a line on it, and whether it has no spills.

    Raises BuildError if it does not compile, or if NVRTC is not installed."""
    plan = SCHEDULES[setup.schedule](setup.graph())
    facts: dict[str, Any] = report(plan.graph.name, plan)
    is_good = not (facts["spill_bytes"] or facts["stack_bytes"] or facts["remarks"])
    return (
        f"for {ARCH} in {facts['compile_s']:.0f} s, {facts['registers']} registers, "
        f"{facts['spill_bytes']} bytes of spills",
        is_good,
    )


def prove_steps(setup: ModelSetup, batches: Collection[int]) -> str:
    """Prove all steps of these numbers of requests, of every length; a line on it.

    Raises GraphError for a step with a deadlock or a race."""
    graph, settings, start = setup.graph(), Settings.load(), time.perf_counter()
    plan = SCHEDULES[setup.schedule](graph)
    heights = {padded(batch) for batch in batches}
    dims_of_steps = [
        dims for dims in setup.dims(graph, WORKERS) if dims["rows"] in heights
    ]
    num_tasks = sum(
        prove(plan, dims, WORKERS, settings).tasks for dims in dims_of_steps
    )
    seconds = time.perf_counter() - start
    return f"{len(dims_of_steps)} steps with {num_tasks} tasks in {seconds:.0f} s"
