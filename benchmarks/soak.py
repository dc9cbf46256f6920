"""Many runs of mixed shapes in a row, every output compared with the first bit by bit.

launch/mpirun -n 8 benchmarks/soak.py --runs 1000
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import records
from benchmarks.all_gather_matmul import AllGatherMatmulWorkload
from benchmarks.command import begin, may_record, provenance, teller
from benchmarks.device import Device
from benchmarks.harness import (
    TOLERANCE,
    Case,
    Shape,
    Workload,
    bitwise_equal,
    relative_error,
)
from benchmarks.matmul_reduce_scatter import MatmulReduceScatterWorkload
from etc_dist.ops.product import ProductOperation

BATCH = 100
"""Runs without any synchronisation of the host."""
# dtype, layout of w, rows of one rank, N, K: whole tiles, tails in every direction,
# less than one tile, one row, one step of K and many.
CASES = (
    (MatmulReduceScatterWorkload(), "bfloat16", "nk", 1024, 1024, 512),
    (MatmulReduceScatterWorkload(), "bfloat16", "nk", 3, 264, 72),
    (MatmulReduceScatterWorkload(), "bfloat16", "kn", 300, 1000, 136),
    (MatmulReduceScatterWorkload(), "float16", "nk", 129, 256, 1032),
    (MatmulReduceScatterWorkload(), "float16", "kn", 777, 1288, 200),
    (MatmulReduceScatterWorkload(), "float16", "kn", 1, 8, 8),
    (AllGatherMatmulWorkload(), "bfloat16", "nk", 1024, 1024, 512),
    (AllGatherMatmulWorkload(), "bfloat16", "nk", 5, 264, 72),
    (AllGatherMatmulWorkload(), "bfloat16", "kn", 300, 1000, 136),
    (AllGatherMatmulWorkload(), "float16", "nk", 129, 256, 1032),
    (AllGatherMatmulWorkload(), "float16", "kn", 777, 1288, 200),
    (AllGatherMatmulWorkload(), "float16", "kn", 1, 8, 8),
)


@dataclass(frozen=True)
class Soaked:
    """A case made ready: its operation, arguments, and the bits that it must give."""

    operation: ProductOperation
    case: Case
    w: Any
    first: Any


class Soak:
    """The cases on one device; operations are shared by cases of a kind."""

    def __init__(self, device: Device):
        self.device = device
        self.operations: dict[tuple[type[Workload], str, str], ProductOperation] = {}
        self.error = 0.0
        self.faults: list[str] = []
        self.cases = [self._prepare(*case) for case in CASES]
        self._differing = device.xp.zeros(1, "int64")

    def run(self, order: Sequence[int]) -> int:
        """Run the cases in `order`; the runs whose bits differ on any rank, counted
        rank by rank."""
        for first in range(0, len(order), BATCH):
            for number in order[first : first + BATCH]:
                self._run(self.cases[number])
            self.synchronize()
        counts = self.device.world.gather(int(self._differing[0]))
        return sum(cast(list[int], counts))

    def synchronize(self) -> None:
        for operation in self.operations.values():
            operation.synchronize()

    def close(self) -> None:
        for operation in self.operations.values():
            operation.close()

    def _run(self, soaked: Soaked) -> None:
        case = soaked.case
        self.device.poison(case.out)
        soaked.operation(case.x, soaked.w, case.out)
        # NOTE: counted on the device, for the host is to run ahead.
        self._differing += self.device.differs(case.out, soaked.first)

    def _prepare(
        self, workload: Workload, dtype: str, layout: str, rows: int, n: int, k: int
    ) -> Soaked:
        kind = (type(workload), dtype, layout)
        if kind not in self.operations:
            made = workload.operation(
                dtype=dtype, w_layout=layout, world=self.device.world
            )
            self.operations[kind] = made
        operation = self.operations[kind]
        shape = Shape(rows, n, k, self.device.world.size)
        name = f"{workload.name} {dtype} {layout} {rows} x {n} x {k}"
        case = Case.make(self.device, workload, shape, dtype, name)
        w = self.device.transpose(case.w) if layout == "kn" else case.w
        call = workload.call(operation, case.with_w(w))
        equal = bitwise_equal(self.device, operation, call, case.out)
        self._judge(name, case, equal)
        return Soaked(operation, case, w, case.out.copy())

    def _judge(self, name: str, case: Case, equal: bool) -> None:
        error = relative_error(self.device, case.out, case.reference(self.device))
        if not error <= TOLERANCE[case.dtype]:
            self.faults.append(f"{name}: error {error:.2e}")
        if not equal:
            self.faults.append(f"{name}: three runs differ in their bits")
        if case.dtype == "bfloat16":
            self.error = max(self.error, error)


def main() -> int:
    parser = argparse.ArgumentParser(description="Run mixed shapes for long.")
    add = parser.add_argument
    add("--runs", type=int, help="1000, or 50 on the CPU backend")
    add("--seed", type=int, default=0, help="of the order of the cases")
    add("--record", type=Path, help="default: benchmarks/results/soak.jsonl")
    add("--cpu", action="store_true", help="the CPU backend")
    options = parser.parse_args()
    device = begin(options.cpu)
    world = device.world
    tell = teller(world)
    soak = Soak(device)
    tell(f"soak: {len(soak.cases)} cases, largest error {soak.error:.2e}")
    runs = options.runs or (1000 if world.backend == "cuda" else 50)
    # The same order on every rank: runs are collective.
    order = random.Random(options.seed).choices(range(len(CASES)), k=runs)
    started = time.perf_counter()
    mismatches = soak.run(order)
    seconds = time.perf_counter() - started
    if mismatches:
        soak.faults.append(f"{mismatches} runs differ from the first of their shape")
    tell(f"soak: {runs} runs in {seconds:.1f} s, {mismatches} mismatches")
    tell("\n".join(f"FAILED: {fault}" for fault in soak.faults) or "soak: passed")
    if not soak.faults and may_record(world, options.record):
        record = _record(device, soak, runs, seconds)
        records.append(record, options.record)
    soak.close()
    world.close()
    return int(bool(soak.faults))


def _record(
    device: Device, soak: Soak, runs: int, seconds: float
) -> records.SoakRecord:
    facts = device.facts()
    del facts["baseline"]
    return records.SoakRecord(
        op="soak",
        **provenance(soak.cases[0].operation.program),
        **facts,
        **records.stamp(),
        cases=len(soak.cases),
        runs=runs,
        mismatches=0,
        hangs=0,  # a hang would have ended in WaitTimeoutError
        seconds=round(seconds, 3),
        error=soak.error,
    )


if __name__ == "__main__":
    sys.exit(main())
