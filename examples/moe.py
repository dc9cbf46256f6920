"""The mixture of experts of a transformer as one kernel a rank, routing included.

    launch/mpirun -n 2 examples/moe.py

On GPUs with the sizes of Qwen3-30B-A3B, else with small ones. Each of 1, 2, 4 or 8
ranks holds a shard of the experts and separate tokens. A few of them are compared with
the definition, computed in fp32.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

import etc_dist
from etc_dist import MoE

COMPARED = 8
"""Tokens that are compared."""


def definition(x: Any, ids: Any, weights: Any, gate_up: Any, down: Any) -> Any:
    """The weighted sum of the experts `ids` for one token x [hidden]."""
    total = np.float32(0)
    for expert, weight in zip(ids.tolist(), weights.tolist(), strict=True):
        gate_and_up = gate_up[expert].astype(np.float32) @ x
        gates, ups = (
            gate_and_up[: len(gate_and_up) // 2],
            gate_and_up[len(gate_and_up) // 2 :],
        )
        active = gates / (1 + np.exp(-gates)) * ups
        total = total + weight * (down[expert].astype(np.float32) @ active)
    return total


def main() -> None:
    with etc_dist.start() as world:
        if world.backend == "cuda":
            import cupy as xp

            tokens, hidden, inner, experts, top_k = 4096, 2048, 768, 128, 8
        else:
            xp = np
            tokens, hidden, inner, experts, top_k = 100, 128, 64, 16, 4
        rng = xp.random.default_rng(0)

        def normal(*shape: int, scale: float) -> Any:
            array = rng.standard_normal(shape, dtype=xp.float32) * np.float32(scale)
            return array.astype(ml_dtypes.bfloat16)

        router = normal(experts, hidden, scale=hidden**-0.5)
        # Gate's rows, then up's.
        gate_up = normal(experts, 2 * inner, hidden, scale=hidden**-0.5)
        down = normal(experts, hidden, inner, scale=inner**-0.5)
        rng = xp.random.default_rng(1 + world.rank)
        x = normal(tokens, hidden, scale=1)

        share = experts // world.size
        own_experts = slice(world.rank * share, (world.rank + 1) * share)
        with MoE(
            router,
            gate_up[own_experts],
            down[own_experts],
            top_k=top_k,
            parallel="expert",
            world=world,
        ) as moe:
            y = moe(x)
            moe.synchronize()
            num_calls = len(moe.program.plan.graph.calls)

        rows = x.astype(np.float32)
        logits = rows @ router.astype(np.float32).T
        ids = xp.argsort(-logits, axis=1)[:, :top_k]
        shares = xp.exp(xp.take_along_axis(logits, ids, axis=1))
        shares /= shares.sum(axis=1, keepdims=True)
        expected = xp.stack(
            [
                definition(rows[token], ids[token], shares[token], gate_up, down)
                for token in range(COMPARED)
            ]
        )
        off = y[:COMPARED].astype(np.float32) - expected
        error = float(xp.linalg.norm(off) / xp.linalg.norm(expected))
        worst = max(world.gather(error))
        counts = xp.bincount(ids.ravel(), minlength=experts)
        if world.rank == 0:
            print(world.show())
            print(f"{tokens} tokens a rank, {top_k} of {experts} experts each")
            print(f"{int(counts.min())} to {int(counts.max())} of rank 0's per expert")
            print(f"{num_calls} calls in one kernel")
            print(f"error against fp32: {worst:.1e}")
    if not worst < 5e-3:
        raise SystemExit(f"rank {world.rank}: the result is wrong")


if __name__ == "__main__":
    main()
