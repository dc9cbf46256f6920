"""The host's cost of a model's step, without the launch: checks, copies, and waiting.

launch/mpirun -n 1 benchmarks/step_cost.py

Prints microseconds for steps of some rows, on either backend, and records them on GPUs,
where the launch itself takes about 3 more.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

import etc_dist
from benchmarks.decode_launches import read_prompts
from benchmarks.device import Call, Gpu, open_device
from benchmarks.harness import numbers, parser_for, provenance, record, say
from etc_dist.ir.tensor import numpy_dtype
from etc_dist.models.config import ModelConfig
from etc_dist.models.model import Model
from etc_dist.models.weights import weight_shapes
from etc_dist.program import Program
from etc_dist.settings import Settings
from etc_dist.world import World

ROWS = 1, 8, 32, 128
POSITIONS, PROMPT = 1024, 8
ROUNDS, STEPS = 4000, 20
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
    world: World, weights: dict[str, Any], rows: int
) -> tuple[float, dict[str, Any]]:
    """Microseconds of a step, and where it ran."""
    with Model(CONFIG, weights, batch=rows, positions=POSITIONS, world=world) as model:
        for _ in range(rows):
            model.pages.add(POSITIONS)
        table = model.pages.table
        read_prompts(model, np.ones((rows, PROMPT), np.int32))
        given = [1] * rows, list(range(rows)), [PROMPT] * rows
        model.step(*given, table)
        with without_launches(model.program):
            cost = fastest_us(lambda: model.step(*given, table), ROUNDS, STEPS)
        return cost, provenance(model.program)


def main() -> int:
    parser = parser_for("Time the host in a model's step.", "step_cost")
    parser.add_argument("--rows", type=numbers, default=ROWS, help="of each step")
    options = parser.parse_args()
    backend = {"ETC_DIST_BACKEND": "cpu"} if options.cpu else {}
    settings = Settings.load({**os.environ, **backend})
    world = etc_dist.start(replace(settings, verify=0))  # without checks of the data
    element = numpy_dtype("bfloat16")
    weights = {name: np.zeros(s, element) for name, s in weight_shapes(CONFIG).items()}
    device = open_device(world)
    shared: dict[str, Any] = {"op": "step_cost", "protocol": PROTOCOL}
    if isinstance(device, Gpu):
        shared |= device.machine()
    for rows in options.rows:
        cost, where = step_cost(world, weights, rows)
        say(world, f"{rows:4} rows: {cost:.1f} us")
        values = {"rows": rows, "host_us": round(cost, 2)}
        record(device, options.record, {**shared, **where, **values})
    world.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
