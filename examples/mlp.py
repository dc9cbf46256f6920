"""The dense MLP of a transformer, split over the ranks, as one kernel on each.

    launch/mpirun -n 4 examples/mlp.py

On GPUs with the sizes of Llama 3 70B, else with small ones. A few rows are compared
with the definition, computed by NumPy in fp32 from all ranks' rows and weights.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

import etc_dist
from etc_dist import MLP

COMPARED = 4
"""Rows of each rank that are compared."""


def definition(x: Any, gate: Any, up: Any, down: Any) -> Any:
    """The partial sum of one rank's shard of the weights."""
    x, gate, up, down = (array.astype(np.float32) for array in (x, gate, up, down))
    gates = x @ gate.T
    return (gates / (1 + np.exp(-gates)) * (x @ up.T)) @ down.T


def main() -> None:
    with etc_dist.start() as world:
        if world.backend == "cuda":
            import cupy as xp

            rows, hidden, inner = 1024, 8192, 28672 // world.size // 8 * 8
        else:
            xp = np
            rows, hidden, inner = 48, 256, 1024 // world.size // 8 * 8
        rng = xp.random.default_rng(world.rank)

        def normal(m: int, n: int, scale: float) -> Any:
            array = rng.standard_normal((m, n), dtype=xp.float32) * np.float32(scale)
            return array.astype(ml_dtypes.bfloat16)

        gate, up = (normal(inner, hidden, hidden**-0.5) for _ in range(2))
        down = normal(hidden, inner, (inner * world.size) ** -0.5)
        x = normal(rows, hidden, 1)  # this rank's rows, in and out

        with MLP(gate, up, down, world=world) as mlp:
            y = mlp(x)
            mlp.synchronize()
            num_calls = len(mlp.program.plan.graph.calls)

        few = [xp.asarray(part) for part in world.gather(to_host(x[:COMPARED]))]
        parts = [to_host(definition(xs, gate, up, down)) for xs in few]
        expected = sum(theirs[world.rank] for theirs in world.gather(parts))
        off = to_host(y[:COMPARED]).astype(np.float32) - expected
        error = float(np.linalg.norm(off) / np.linalg.norm(expected))
        worst = max(world.gather(error))
        if world.rank == 0:
            print(world.show())
            print(
                f"{rows * world.size} rows, hidden {hidden}, inner {inner} on each rank"
            )
            print(f"{num_calls} calls in one kernel")
            print(f"error against fp32: {worst:.1e}")
    if not worst < 5e-3:
        raise SystemExit(f"rank {world.rank}: the result is wrong")


def to_host(array: Any) -> Any:
    return array if isinstance(array, np.ndarray) else array.get()


if __name__ == "__main__":
    main()
