"""The host's cost of a model's step, without the launch: checks, copies, and waiting.

launch/mpirun -n 1 benchmarks/step_cost.py

Prints microseconds for steps of some rows, on either backend. On GPUs the launch itself
takes about 3 more. Nothing is recorded.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

import etc_dist
from benchmarks.harness import numbers, say
from etc_dist.ir.tensor import numpy_dtype
from etc_dist.models.config import ModelConfig
from etc_dist.models.model import Model
from etc_dist.models.weights import weight_shapes
from etc_dist.settings import Settings
from etc_dist.world import World

ROWS = 1, 8, 32, 128
POSITIONS = 1024
ROUNDS, STEPS = 200, 20
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


def step_cost(world: World, weights: dict[str, Any], rows: int) -> float:
    """Microseconds of the fastest rounds: others are those of a busy machine."""
    with Model(CONFIG, weights, batch=rows, positions=POSITIONS, world=world) as model:
        table = np.arange(model.pages.table.size, dtype=np.int32)
        table = table.reshape(model.pages.table.shape)
        given = [1] * rows, list(range(rows)), [POSITIONS // 2] * rows
        model.step(*given, table)
        model.program._executor.launch = lambda *_: None  # type: ignore[method-assign]
        rounds = []
        for _ in range(ROUNDS):
            started = time.perf_counter()
            for _ in range(STEPS):
                model.step(*given, table)
            rounds.append((time.perf_counter() - started) / STEPS * 1e6)
    return min(rounds)


def main() -> int:
    parser = argparse.ArgumentParser(description="Time the host in a model's step.")
    parser.add_argument("--cpu", action="store_true", help="on the CPU backend")
    parser.add_argument("--rows", type=numbers, default=ROWS, help="of each step")
    options = parser.parse_args()
    backend = {"ETC_DIST_BACKEND": "cpu"} if options.cpu else {}
    settings = Settings.load({**os.environ, **backend})
    world = etc_dist.start(replace(settings, verify=0))  # without checks of the data
    element = numpy_dtype("bfloat16")
    weights = {name: np.zeros(s, element) for name, s in weight_shapes(CONFIG).items()}
    for rows in options.rows:
        cost = step_cost(world, weights, rows)
        say(world, f"{rows:4} rows: {cost:.1f} us")
    world.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
