"""What all benchmarks share: the command line, the records of each result, and the
record of each run."""

from __future__ import annotations

import argparse
import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import etc_dist
from benchmarks import records
from benchmarks.device import Device, Gpu, open_device
from etc_dist.program import Program
from etc_dist.settings import Settings

SCHEDULES = ("static", "dynamic", "auto")
REPEATS = 21
SMALL = "small"
"""The name of the model that the CPU backend checks."""
HIDDEN = {"op", "model", "path", "world_size", "backend", "repeats", "ours_spread_ms"}
HIDDEN |= {"device", "driver", "cuda"}
"""Fields that are recorded and not printed."""
Result = tuple[Mapping[str, Any], Sequence[str]]
"""The fields of a record that one shape has, and its checks that failed."""


@dataclass(frozen=True)
class Subject:
    """A benchmark."""

    title: str
    measure: Callable[[Run], Iterator[Result]]
    """Yields the result of each shape, on all ranks."""
    add_options: Callable[[argparse.ArgumentParser], None] = lambda parser: None
    refusal: Callable[[argparse.Namespace], str] = lambda options: ""
    """What is wrong with its options; "" for nothing."""
    op: str = ""
    """The kind of its records, if it is not the name of its file."""
    has_world: bool = True
    """Whether it needs `etc_dist.start`; without, it is recorded on any machine."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of the world, where they are not the environment's."""


class Run:
    """One start of a subject with the options of a command line. Collective."""

    def __init__(
        self,
        subject: Subject,
        name: str,
        options: argparse.Namespace,
        arguments: Sequence[str],
    ):
        self.subject, self.name, self.options = subject, name, options
        self.arguments = " ".join(arguments)
        self.op, self.id = subject.op or name, uuid.uuid4().hex[:12]
        self.shared: dict[str, Any] = {}
        """Fields of all results, which are not printed."""
        self.is_timed = True
        """Whether results have times; others are not recorded."""
        self.recorded, self.failed = 0, list[str]()
        if subject.has_world:
            self.say(self.device.world.show())
            if not isinstance(self.device, Gpu):
                self.say("the CPU backend checks results and measures nothing")

    @cached_property
    def device(self) -> Device:
        """This rank's, of the world that its first use starts."""
        backend = {"ETC_DIST_BACKEND": "cpu"} if self.options.cpu else {}
        settings = Settings.load({**os.environ, **backend})
        return open_device(etc_dist.start(replace(settings, **self.subject.settings)))

    @property
    def is_recorded(self) -> bool:
        return not self.subject.has_world or isinstance(self.device, Gpu)

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that prints and records."""
        return not self.subject.has_world or self.device.world.rank == 0

    def say(self, text: str) -> None:
        if self.is_first:
            print(text, flush=True)

    # ----------------------------------------------------------------- the records

    def execute(self) -> int:
        """Measure all shapes; the exit code."""
        self._note("started")
        try:
            for values, wrong in self.subject.measure(self):
                self.report(values, wrong)
        except BaseException as error:
            self.failed.append(f"{type(error).__name__}: {error}")
            raise
        finally:
            self._note("ended", recorded=self.recorded, failed=self.failed)
        if self.subject.has_world:
            self.device.world.close()
        return int(bool(self.failed))

    def report(self, values: Mapping[str, Any], wrong: Sequence[str] = ()) -> None:
        """Print a result, and record it unless a check failed."""
        shape = described({"op": self.op, **values})
        self.failed += [f"{shape}: {fault}" for fault in wrong]
        self.say("".join([shape, *(f"\n  FAILED: {fault}" for fault in wrong)]))
        if self.is_recorded and self.is_timed and not wrong:
            self.recorded += 1
            machine = self.device.machine if isinstance(self.device, Gpu) else {}
            run_values = {"op": self.op, "run": self.id, **machine, **self.shared}
            self._append({**run_values, **values})

    def _note(self, state: str, **values: Any) -> None:
        """Record that the run has started or ended."""
        if self.is_recorded:
            size = self.device.world.size if self.subject.has_world else 1
            run_values = {
                "op": "run",
                "run": self.id,
                "state": state,
                "world_size": size,
            }
            run_values |= {"subject": self.name, "options": self.arguments}
            self._append({**run_values, **values})

    def _append(self, values: Mapping[str, Any]) -> None:
        if self.is_first:
            records.append(values, self.options.record)


def execute(subject: Subject, name: str, arguments: Sequence[str]) -> int:
    """Run a subject with the options of a command line; the exit code."""
    parser = argparse.ArgumentParser(f"benchmarks/run.py {name}", None, subject.title)
    add = parser.add_argument
    add("--record", type=Path, help="default: benchmarks/results/<op>.jsonl")
    add("--cpu", action="store_true", help="only check results, on the CPU backend")
    subject.add_options(parser)
    options = parser.parse_args(arguments)
    if text := subject.refusal(options):
        parser.error(text)
    return Run(subject, name, options, arguments).execute()


def described(values: Mapping[str, Any]) -> str:
    """A line of output: the operation, its shape, its checks and its times."""
    words = [f"{values['op']} {values.get('model', '')}".rstrip()]
    for name, value in values.items():
        if name not in HIDDEN:
            number = f"{value:.4g}" if isinstance(value, float) else value
            words.append(f"{name} {number}")
    return ", ".join(words)


def provenance(program: Program) -> dict[str, Any]:
    """The fields of a record that follow from its program."""
    world, plan = program.world, program.plan
    return {
        "world_size": world.size,
        "backend": world.backend,
        "path": f"{plan.graph.name}, {plan.schedule} schedule, "
        f"{world.backend} backend, {program.workers} workers",
    }


# ----------------------------------------------------------------- options of subjects


def add_models(parser: argparse.ArgumentParser, models: Iterable[str]) -> None:
    """The option of some models."""
    all_models = (*models, SMALL)

    def names(text: str) -> list[str]:
        faults = set(text.split(",")) - set(all_models)
        if faults:
            raise argparse.ArgumentTypeError(f"unknown models {sorted(faults)}")
        return text.split(",")

    parser.add_argument("--models", type=names, help=f"some of {','.join(all_models)}")


def add_shapes(parser: argparse.ArgumentParser, models: Iterable[str]) -> None:
    """The options of a benchmark of models."""
    add = parser.add_argument
    add_models(parser, models)
    add("--rows-per-rank", "--tokens", "--batches", type=numbers, dest="rows")
    add("--schedule", choices=SCHEDULES, default="static")
    add("--repeats", type=int, default=REPEATS)


def add_batch(parser: argparse.ArgumentParser) -> None:
    """The option of an operation that has `deterministic="batch"`."""
    text = "also time deterministic='batch', in the same run"
    parser.add_argument("--batch", action="store_true", help=text)


def numbers(text: str) -> list[int]:
    """The type of an option: positive numbers separated by commas."""
    values = [int(number) for number in text.split(",")]
    if min(values) < 1:
        raise argparse.ArgumentTypeError(f"{min(values)} is not positive")
    return values
