"""Many calls of mixed operations, layers, shapes and schedules in a row: each result
compared with the first one of its call bit by bit, and no growth of memory.

launch/mpirun -n 4 --mps benchmarks/soak.py --calls 10000
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import records
from benchmarks.command import begin, may_record, teller
from benchmarks.device import Device
from benchmarks.soak_cases import SCHEDULES, Case, Cases

BATCH = 100
"""Calls without any synchronisation of the host."""
LINES = 10
"""Of progress."""
HOST_TOLERANCE = 8 << 20
"""Bytes by which a rank's resident memory may grow: allocators keep some pages. A leak
of one kilobyte a call is more after 10,000 calls."""
DIFFERING = """
if (a != b) flags[number] = 1;
"""


@dataclass(frozen=True)
class Memory:
    """Bytes in use: of the GPU by all of its processes, and of this rank's process."""

    device: int
    host: int

    @classmethod
    def now(cls, device: Device) -> Memory:
        """Collective."""
        device.synchronize()
        gc.collect()
        device.world.barrier()
        used = 0
        if device.world.backend == "cuda":
            free, total = device.xp.cuda.runtime.memGetInfo()
            used = int(total - free)
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        device.world.barrier()
        return cls(used, pages * os.sysconf("SC_PAGE_SIZE"))

    def growth(self, device: Device, before: Memory) -> Memory:
        """Since `before`, the largest of all ranks. Collective."""
        mine = self.device - before.device, self.host - before.host
        every = cast(list[tuple[int, int]], device.world.gather(mine))
        return Memory(*map(max, zip(*every, strict=True)))


@dataclass(frozen=True)
class Result:
    """What the calls gave; alike on all ranks."""

    seconds: float
    mismatches: int
    growth: Memory


class Soak:
    """All cases on one device."""

    def __init__(self, device: Device):
        self.device, self.world = device, device.world
        self._tell = teller(self.world)
        started = time.perf_counter()
        self.cases = list(Cases(self.world, device.xp.asarray))
        seconds = time.perf_counter() - started
        self.operations = list(
            {id(c.operation): c.operation for c in self.cases}.values()
        )
        self.errors = [self._error(case) for case in self.cases]
        self._differ = differing_of(device)
        kinds = f"{len(self.cases)} cases of {len(self.operations)} operations"
        self._tell(f"soak: {kinds} are ready after {seconds:.0f} s")

    def faults(self) -> list[str]:
        """Cases whose first result is not near its reference."""
        return [
            f"{case.name}: error {error:.2e}, wanted {case.tolerance:.1e}"
            for case, error in zip(self.cases, self.errors, strict=True)
            if not error <= case.tolerance  # so that NaN is refused too
        ]

    def run(self, order: Sequence[int]) -> Result:
        """Call the cases in `order`, the same on every rank."""
        flags = self.device.xp.zeros(len(order), "int8")
        for number in range(len(self.cases)):  # what is allocated once is allocated now
            self._call(self.cases[number], flags, 0)
        self.synchronize()
        flags.fill(0)
        before = Memory.now(self.device)
        started = time.perf_counter()
        line = max(BATCH, len(order) // LINES)
        for done, number in enumerate(order, 1):
            self._call(self.cases[number], flags, done - 1)
            if done % BATCH == 0:
                self.synchronize()
            if done % line == 0:
                self._tell(f"soak: {done} calls, {time.perf_counter() - started:.1f} s")
        self.synchronize()
        self.device.synchronize()
        seconds = time.perf_counter() - started
        growth = Memory.now(self.device).growth(self.device, before)
        counts = cast(list[int], self.world.gather(int(flags.sum())))
        return Result(seconds, sum(counts), growth)

    def synchronize(self) -> None:
        for operation in self.operations:
            operation.synchronize()

    def close(self) -> None:
        for operation in self.operations:
            operation.close()

    def _call(self, case: Case, flags: Any, number: int) -> None:
        self.device.poison(case.out)
        case.call()
        # NOTE: compared on the device, for the host is to run ahead.
        self._differ(case.out, case.first, number, flags)

    def _error(self, case: Case) -> float:
        """The largest relative error of all ranks."""
        first = case.first if isinstance(case.first, np.ndarray) else case.first.get()
        off = np.linalg.norm(first.astype(np.float32) - case.expected)
        mine = float(off / np.linalg.norm(case.expected))
        # NOTE: NumPy's maximum keeps NaN.
        return float(np.max(cast(list[float], self.world.gather(mine))))


def differing_of(device: Device) -> Callable[[Any, Any, int, Any], None]:
    """A function (a, b, number, flags): flags[number] = 1 if a bit of two 16-bit arrays
    differs. It allocates nothing on the device."""
    if device.world.backend == "cpu":

        def compare(a: Any, b: Any, number: int, flags: Any) -> None:
            flags[number] = device.differs(a, b)

        return compare
    kernel = device.xp.ElementwiseKernel(
        "uint16 a, uint16 b, int64 number", "raw int8 flags", DIFFERING, "differing"
    )

    def enqueue(a: Any, b: Any, number: int, flags: Any) -> None:
        kernel(a.view(np.uint16), b.view(np.uint16), number, flags)

    return enqueue


def main() -> int:
    parser = argparse.ArgumentParser(description="Run mixed calls for long.")
    add = parser.add_argument
    add("--calls", type=int, help="10000, or 100 on the CPU backend")
    add("--seed", type=int, default=0, help="of the order of the calls")
    add("--record", type=Path, help="default: benchmarks/results/soak.jsonl")
    add("--cpu", action="store_true", help="the CPU backend")
    options = parser.parse_args()
    device = begin(options.cpu)
    world = device.world
    tell = teller(world)
    soak = Soak(device)
    tell(f"soak: largest error {max(soak.errors):.2e}")
    calls = options.calls or (10000 if world.backend == "cuda" else 100)
    order = random.Random(options.seed).choices(range(len(soak.cases)), k=calls)
    result = soak.run(order)
    faults = soak.faults() + faults_of(result)
    tell(
        f"soak: {calls} calls in {result.seconds:.1f} s, {result.mismatches} mismatches"
        f", growth of {result.growth.device} bytes on the GPU and {result.growth.host} "
        "in a process"
    )
    tell("\n".join(f"FAILED: {fault}" for fault in faults) or "soak: passed")
    if not faults and may_record(world, options.record):
        records.append(record_of(device, soak, calls, result), options.record)
    soak.close()
    world.close()
    return int(bool(faults))


def faults_of(result: Result) -> list[str]:
    """What is wrong with the calls, in words."""
    found = []
    if result.mismatches:
        found.append(f"{result.mismatches} results differ from the first of their call")
    if result.growth.device > 0:
        found.append(f"the GPU's memory grew by {result.growth.device} bytes")
    if result.growth.host > HOST_TOLERANCE:
        grown = f"a process grew by {result.growth.host} bytes"
        found.append(f"{grown}, more than {HOST_TOLERANCE}")
    return found


def record_of(
    device: Device, soak: Soak, calls: int, result: Result
) -> records.SoakRecord:
    world, facts = device.world, device.facts()
    del facts["baseline"]
    workers = soak.operations[0].program.workers
    return records.SoakRecord(
        op="soak",
        world_size=world.size,
        backend=world.backend,
        path=f"{len(soak.operations)} operations and layers, {' and '.join(SCHEDULES)} "
        f"schedules, {world.backend} backend, {workers} workers",
        **facts,
        **records.stamp(),
        cases=len(soak.cases),
        runs=calls,
        mismatches=result.mismatches,
        hangs=0,  # a hang would have ended in WaitTimeoutError
        seconds=round(result.seconds, 3),
        error=max(soak.errors),
        ranks_per_gpu=world.ranks_per_gpu,
        mps=world.mps,
        growth_bytes=result.growth.device,
        host_growth_bytes=result.growth.host,
    )


if __name__ == "__main__":
    sys.exit(main())
