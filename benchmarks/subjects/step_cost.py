"""The host's cost of a model's step, without the launch: checks, copies, and waiting.

Microseconds for steps of some rows, on either backend; on GPUs the launch itself takes
about 3 more.
"""

from __future__ import annotations

import time
from argparse import ArgumentParser
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import numpy as np

from benchmarks.decoder_launches import read_prompts
from benchmarks.device import Call, Device, Gpu
from benchmarks.harness import Result, Run, Subject, numbers, provenance
from etc_dist.ir.tensor import numpy_dtype
from etc_dist.models.config import ModelConfig
from etc_dist.models.model import Model
from etc_dist.models.weights import weight_shapes
from etc_dist.program import Program

ROWS = 1, 8, 32, 128
POSITIONS, PROMPT = 1024, 8
ROUNDS, STEPS, CPU_ROUNDS = 4000, 20, 100
PROTOCOL = (
    f"model.step of Python lists, without the launch; mean of {STEPS} calls, the "
    f"fastest of {ROUNDS} rounds"
)
CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    layers=1,
    hidden=256,
    inner=256,
    vocabulary=1024,
    heads=4,
    kv_heads=2,
    head_dim=64,
    positions=POSITIONS,
    norm_eps=1e-6,
    rope_base=1e4,
    rope={},
    is_tied=False,
    stop_tokens=(),
)


def without_launches(program: Program) -> AbstractContextManager[Any]:
    """Calls of a program do everything but the launch."""
    return patch.object(program._executor, "launch", lambda *_: None)


def fastest_us(call: Call, rounds: int, calls: int) -> float:
    """Microseconds of a call in the fastest round, since others are those of a busy
    machine."""
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - started) / calls * 1e6)
    return min(times)


def step_cost(
    device: Device, weights: dict[str, Any], rows: int
) -> tuple[float, dict[str, Any]]:
    """Microseconds of a step, and where it ran."""
    rounds = ROUNDS if isinstance(device, Gpu) else CPU_ROUNDS
    world = device.world
    with Model(CONFIG, weights, batch=rows, positions=POSITIONS, world=world) as model:
        for _ in range(rows):
            model.pages.add(POSITIONS)
        table = model.pages.table
        read_prompts(model, np.ones((rows, PROMPT), np.int32))
        given = [1] * rows, list(range(rows)), [PROMPT] * rows
        model.step(*given, table)
        with without_launches(model.program):
            cost = fastest_us(lambda: model.step(*given, table), rounds, STEPS)
        return cost, provenance(model.program)


def measure(run: Run) -> Iterator[Result]:
    run.shared["protocol"] = PROTOCOL
    element = numpy_dtype("bfloat16")
    weights = {name: np.zeros(s, element) for name, s in weight_shapes(CONFIG).items()}
    for rows in run.options.rows:
        cost, where = step_cost(run.device, weights, rows)
        yield {"rows": rows, "host_us": round(cost, 2), **where}, []


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--rows", type=numbers, default=ROWS, help="of each step")


SUBJECT = Subject(
    *("Time the host in a model's step.", measure, add_options),
    settings={"verify": 0},  # without checks of the data
)
