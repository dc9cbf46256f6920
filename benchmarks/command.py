"""What the command lines of the benchmarks share: options, the world, the records."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import etc_dist
from benchmarks import records
from benchmarks.device import Device, open_device
from etc_dist.program import Program
from etc_dist.settings import Settings
from etc_dist.world import World

SCHEDULES = ("static", "dynamic", "auto")
REPEATS = 21


def parser_for(
    what: str, models: Iterable[str], op: str = "<op>"
) -> argparse.ArgumentParser:
    """Reads the options of a benchmark of models, recorded as `op` by default."""
    known = list(models)

    def names(text: str) -> list[str]:
        named = [name for name in text.split(",") if name]
        unknown = set(named) - set(known)
        if unknown:
            says = f"unknown models {', '.join(sorted(unknown))}"
            raise argparse.ArgumentTypeError(says)
        return named

    parser = argparse.ArgumentParser(description=f"Time {what}.")
    add = parser.add_argument
    text = f"some of {','.join(known)}, with commas between"
    add("--models", type=names, help=text)
    add("--schedule", choices=SCHEDULES, default="static")
    add("--repeats", type=int, default=REPEATS)
    add("--record", type=Path, help=f"default: benchmarks/results/{op}.jsonl")
    add("--cpu", action="store_true", help="the CPU backend: no performance path")
    return parser


def numbers(text: str) -> list[int]:
    """The type of an option that is numbers, with commas between."""
    return [int(number) for number in text.split(",")]


def begin(cpu: bool) -> Device:
    """Start the world, on the CPU backend if asked for, and say which it is; this
    rank's device. Collective."""
    backend = {"ETC_DIST_BACKEND": "cpu"} if cpu else {}
    world = etc_dist.start(Settings.load({**os.environ, **backend}))
    tell = teller(world)
    tell(world.show())
    if world.backend == "cpu":
        tell("the CPU backend is no performance path: its times mean nothing")
    return open_device(world)


def teller(world: World) -> Callable[[str], None]:
    """Prints on rank 0."""
    return lambda text: print(text, flush=True) if world.rank == 0 else None


def may_record(world: World, path: Path | None) -> bool:
    """Rank 0 writes; on the CPU backend only where it was asked to."""
    return world.rank == 0 and (world.backend == "cuda" or path is not None)


def provenance(program: Program) -> dict[str, Any]:
    """What the records of a fused program share besides the device's facts."""
    world, plan = program.world, program.plan
    return {
        "world_size": world.size,
        "backend": world.backend,
        "path": f"{plan.graph.name}, {plan.schedule} schedule, "
        f"{world.backend} backend, {program.workers} workers",
    }


def record_all(
    world: World,
    path: Path | None,
    shared: Mapping[str, Any],
    shapes: Iterable[Mapping[str, Any]],
    faults: Callable[[Mapping[str, Any]], list[str]],
    line: Callable[[Mapping[str, Any]], str],
) -> int:
    """Tell each measured shape in a line, record those without faults, and close the
    world; the exit code. A record is what is `shared` and what the shape says."""
    tell, failed = teller(world), False
    for values in shapes:
        wrong = faults(values)
        failed = failed or bool(wrong)
        tell(line(values) + "".join(f"\n  FAILED: {fault}" for fault in wrong))
        if not wrong and may_record(world, path):
            record = records.parse({**shared, **values, **records.stamp()})
            records.append(record, path)
    world.close()
    return int(failed)
