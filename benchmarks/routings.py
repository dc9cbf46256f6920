"""Random routings in a row through a mixture of experts: all runs of one must give the
same bits, static, dynamic and repeated.

launch/mpirun -n 1 benchmarks/routings.py --routings 1000
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path
from typing import Any, cast

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import records
from benchmarks.command import begin, may_record, provenance, teller
from benchmarks.device import Device
from benchmarks.harness import DTYPE, TOLERANCE, relative_error
from benchmarks.moe import LEEWAY
from etc_dist.layers.moe import MoE

HIDDEN, INNER, EXPERTS, TOP_K = 1024, 384, 128, 8
CPU_SIZES = 32, 16, 16, 4
TOKENS = (1, 3, 31, 32, 33, 100, 256, 517, 1000, 2048)
CPU_TOKENS = (1, 5, 33)
BATCH = 50
"""Routings without any synchronisation of the host."""
KINDS = ("uniform", "zipf", "one set", "half of the experts")
FAR = 64.0
"""A logit that no token overcomes."""


class Routings:
    """One layer under both schedules, whose router is bent for each routing."""

    def __init__(self, device: Device, parallel: str, on_gpu: bool):
        self.device, self.on_gpu = device, on_gpu
        sizes = (HIDDEN, INNER, EXPERTS, TOP_K) if on_gpu else CPU_SIZES
        self.hidden, self.inner, self.experts, self.top_k = sizes
        self.parallel, world = parallel, device.world
        split = world.size if parallel == "tensor" else 1
        own = self.experts if parallel == "tensor" else self.experts // world.size
        inner = self.inner // split
        # Alike on all ranks but for the weights of the experts.
        self.router = self._normal((self.experts, self.hidden), 1)
        gate_up = self._normal((own, 2 * inner, self.hidden), 10 + world.rank)
        down = self._normal((own, self.hidden, inner), 100 + world.rank)
        self.weights = gate_up, down
        self.layers = [self._layer(s) for s in ("static", "dynamic")]
        self.schedules = [layer.program.plan.schedule for layer in self.layers]
        self.graphs: dict[str, None] = {}
        """Names of those that ran."""
        # Over many ranks outputs are compared with one another alone.
        self.error: float | None = 0.0 if device.world.size == 1 else None
        self.faults: list[str] = []
        self._differing = device.xp.zeros(1, "int64")

    def run(self, count: int, seed: int) -> int:
        """The routings whose bits differ on any rank, counted rank by rank."""
        chance = random.Random(seed)  # alike on all ranks
        counts = TOKENS if self.on_gpu else CPU_TOKENS
        # Most and fewest tokens first: a program grows between runs, and only then.
        first = [most for most in (max(counts), min(counts)) for _ in KINDS]
        for number in range(count):
            kind, check = KINDS[number % len(KINDS)], number < len(first)
            tokens = first[number] if check else chance.choice(counts)
            self._route(kind, tokens, chance.getrandbits(30), check)
            if number % BATCH == BATCH - 1:
                self.synchronize()
        self.synchronize()
        found = self.device.world.gather(int(self._differing[0]))
        return sum(cast(list[int], found))

    def synchronize(self) -> None:
        for layer in self.layers:
            layer.synchronize()

    def close(self) -> None:
        for layer in self.layers:
            layer.close()

    def _normal(self, shape: tuple[int, ...], seed: int) -> Any:
        array = self.device.normal(shape, seed) * np.float32(shape[-1] ** -0.5)
        return self.device.convert(array, DTYPE)

    def _layer(self, schedule: str) -> MoE:
        return MoE(
            self.router,
            *self.weights,
            top_k=self.top_k,
            parallel=self.parallel,
            world=self.device.world,
            schedule=schedule,
        )

    def _route(self, kind: str, tokens: int, seed: int, check: bool) -> None:
        device, world = self.device, self.device.world
        tokens *= world.size if self.parallel == "tensor" else 1
        own = 0 if self.parallel == "tensor" else world.rank
        x = device.normal((tokens, self.hidden), seed + own)
        x[:, 0] = 1
        x = device.convert(x, DTYPE)
        bias = device.xp.asarray(self._bias(kind, seed))
        self.router[:, 0] = device.convert(bias, DTYPE)
        outs = []
        for layer in (*self.layers, self.layers[0]):
            shape = tokens // (world.size if self.parallel == "tensor" else 1)
            out = device.xp.empty((shape, self.hidden), x.dtype)
            device.poison(out)
            outs.append(layer(x, out))
            self.graphs[layer.program.plan.graph.name] = None
        # NOTE: counted on the device, for the host is to run ahead.
        self._differing += device.differs(outs[0], outs[1])
        self._differing += device.differs(outs[0], outs[2])
        if check and self.error is not None:
            self.synchronize()
            error = relative_error(device, outs[0], self._reference(x))
            self.error = max(self.error, error)
            if not error <= LEEWAY * TOLERANCE[DTYPE]:
                self.faults.append(f"{kind}, {tokens} tokens: error {error:.2e}")

    def _bias(self, kind: str, seed: int) -> Any:
        """What every token's logits get besides, by expert."""
        chance = np.random.default_rng(seed)
        order = chance.permutation(self.experts)
        bias = np.zeros(self.experts, np.float32)
        if kind == "zipf":
            bias[order] = -1.2 * np.log(np.arange(1, self.experts + 1))
        elif kind == "one set":
            bias[order[: self.top_k]] = FAR
        elif kind == "half of the experts":
            bias[order[: self.experts // 2]] = -FAR
        return bias

    def _reference(self, x: Any) -> Any:
        """In fp32, but for the roundings of activations and rows."""
        xp = self.device.xp
        rows, (gate_up, down) = x.astype(np.float32), self.weights
        logits = rows @ self.router.astype(np.float32).T
        ids = xp.argsort(-logits, axis=1)[:, : self.top_k]
        picked = xp.take_along_axis(logits, ids, axis=1)
        share = xp.exp(picked - picked.max(axis=1, keepdims=True))
        share /= share.sum(axis=1, keepdims=True)
        total = xp.zeros(x.shape, np.float32)
        for expert in range(self.experts):
            chosen = ids == expert
            token = xp.flatnonzero(chosen.any(axis=1))
            if not token.size:
                continue
            product = rows[token] @ gate_up[expert].astype(np.float32).T
            left, right = product[:, : self.inner], product[:, self.inner :]
            active = left / (1 + xp.exp(-left)) * right
            active = active.astype(x.dtype).astype(np.float32)
            result = active @ down[expert].astype(np.float32).T
            weight = (share * chosen)[token].sum(axis=1, keepdims=True)
            total[token] += weight * result.astype(x.dtype).astype(np.float32)
        return total


def main() -> int:
    parser = argparse.ArgumentParser(description="Run random routings for long.")
    add = parser.add_argument
    add("--routings", type=int, help="1000, or 20 on the CPU backend")
    add("--parallel", choices=("tensor", "expert"), default="tensor")
    add("--seed", type=int, default=0)
    add("--record", type=Path, help="default: benchmarks/results/routings.jsonl")
    add("--cpu", action="store_true", help="the CPU backend")
    options = parser.parse_args()
    device = begin(options.cpu)
    world = device.world
    tell, on_gpu = teller(world), world.backend == "cuda"
    routings = Routings(device, options.parallel, on_gpu)
    count = options.routings or (1000 if on_gpu else 20)
    started = time.perf_counter()
    mismatches = routings.run(count, options.seed)
    seconds = time.perf_counter() - started
    if mismatches:
        routings.faults.append(f"{mismatches} results differ in their bits")
    error = routings.error
    told = "not looked at" if error is None else f"{error:.2e} at most"
    tell(
        f"routings: {count} under {', '.join(routings.schedules)} and once more in "
        f"{seconds:.1f} s, {mismatches} mismatches, error {told}"
    )
    faults = [f"FAILED: {fault}" for fault in routings.faults]
    tell("\n".join(faults) or "routings: passed")
    if not faults and may_record(world, options.record):
        facts = device.facts()
        del facts["baseline"]
        shared = provenance(routings.layers[0].program)
        ways = " and ".join(dict.fromkeys(routings.schedules))
        split = f"{options.parallel}-parallel" if world.size > 1 else "one rank"
        _, _, *rest = shared["path"].split(", ")
        shared["path"] = ", ".join([" and ".join(routings.graphs), ways, split, *rest])
        record = records.SoakRecord(
            op="routings",
            **{**shared, **facts, **records.stamp()},
            cases=len(KINDS) * len(TOKENS),
            runs=3 * count,
            mismatches=0,
            hangs=0,  # a hang would have ended in WaitTimeoutError
            seconds=round(seconds, 3),
            error=error,
        )
        records.append(record, options.record)
    routings.close()
    world.close()
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
