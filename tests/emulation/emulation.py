"""Programs run from the kernels' own text on a machine without a GPU, thread by thread.

A host compiler takes the generated source and `kernels/` as they are, but for what is
PTX: of each file of `kernels/ptx` there is one here that does the same (`threads.h`
says how, and what such a run can show).
"""

from __future__ import annotations

import ctypes
import hashlib
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from etc_dist.codegen import generate
from etc_dist.codegen.layout import CONTROL, MAP_BYTES, SHARED_BYTES
from etc_dist.ir import GraphFunction, TmaBox
from etc_dist.runtime.arguments import Places, bind, fill
from etc_dist.runtime.memory_plan import Capacity, aligned, plan_memory
from etc_dist.runtime.tensor_map import axes_of
from etc_dist.schedule import schedule_dynamic, schedule_static

HERE = Path(__file__).parent
KERNELS = HERE.parents[1] / "kernels"
FLAGS = (
    *("-x", "c++", "-std=c++20", "-O1", "-w", "-fPIC", "-shared"),
    *("-fno-exceptions", "-fno-rtti", "-fno-strict-aliasing", "-fno-sanitize=all"),
    # Calls a function before each load and store.
    *("-Xclang", "-fsanitize-coverage-type=1"),
    *("-Xclang", "-fsanitize-coverage-trace-loads"),
    *("-Xclang", "-fsanitize-coverage-trace-stores"),
)
MAP = np.dtype(
    [
        ("pointer", "u8"),
        *((name, "u4") for name in ("itemsize", "axes")),
        *((name, "u4", 5) for name in ("extent", "side")),
        ("pitch", "u8", 5),
    ]
)
WAIT_LIMIT = 100
"""Milliseconds that a wait may last, of those that `threads.h` counts."""


class Emulated:
    """A graph's program on all of its ranks at once, `workers` on each; compiled in
    `folder`."""

    def __init__(
        self,
        graph: GraphFunction,
        folder: Path,
        schedule: str = "static",
        kernels: Path = KERNELS,
        workers: int = 4,
    ):
        plan = {"static": schedule_static, "dynamic": schedule_dynamic}[schedule]
        self.plan = plan(graph)
        self.source = generate(self.plan, trace=False)
        self.workers = workers
        self._run = _compile(self.source.text, folder, kernels)
        self._memory: dict[tuple[int, ...], Memory] = {}

    def run(
        self,
        arrays: Sequence[Mapping[str, np.ndarray[Any, Any]]],
        dims: Mapping[str, int],
        seed: int = 0,
        runs: int = 1,
        broken: int = 0,
    ) -> None:
        """Run on each rank's inputs and outputs, `runs` times in a row, where no rank
        waits for the others in between; AssertionError where something goes wrong that
        shows by itself, such as a wait that is given up, or accesses that nothing puts
        in order. Calls at the same dims share the program's memory, as on a GPU, but
        nothing that it computed. `broken` is `emulation::broken`, if the kernels have
        it."""
        key = tuple(dims.values())
        if key not in self._memory:
            self._memory[key] = Memory(self.plan, self.source, dims, self.workers)
        memory = self._memory[key]
        memory.begin()
        blocks: list[np.ndarray[Any, Any]] = []
        written = {tensor.name for tensor in self.plan.graph.outputs()}
        known = [(a, True) for a in memory.arrays]  # and whether it may be written
        for rank, named in enumerate(arrays):
            assert all(a.flags.c_contiguous for a in named.values())
            pointers = {name: a.ctypes.data for name, a in named.items()}
            args = memory.arguments[rank].copy()
            bind(args, self.plan, self.source, pointers, dims, rank, _encode)
            blocks.append(_at_multiple(args.tobytes()))
            known += [(a, name in written) for name, a in named.items()]
            known.append((blocks[-1], False))
        places = (ctypes.c_void_p * len(blocks))(*(b.ctypes.data for b in blocks))
        # The last of a range's words is for the run.
        ranges = sorted(
            (a.ctypes.data, a.ctypes.data + a.nbytes, may_be, 0) for a, may_be in known
        )
        wrong = self._run(
            places,
            np.array(ranges, np.uint64).ctypes,
            len(ranges),
            len(blocks),
            self.workers,
            self.source.cluster,
            SHARED_BYTES[self.source.has_matmul],
            runs,
            broken,
            seed,
        )
        faults = [c["fault"][0][: c["faults"][0]] for c in memory.control]
        given_up = {rank: found for rank, found in enumerate(faults) if len(found)}
        if wrong or given_up:
            del self._memory[
                key
            ]  # events and tickets are those of a run that was cut off
        text = (wrong or b"").decode()
        assert not text and not given_up, f"{text}; given up: {given_up}"


class Memory:
    """What a program's runs at some dims share, on all ranks."""

    def __init__(self, plan: Any, source: Any, dims: Mapping[str, int], workers: int):
        ranks = range(plan.graph.world_size)
        capacity = Capacity().grown(plan_memory(plan, dims))
        self.control = [np.zeros(1, CONTROL) for _ in ranks]
        for control in self.control:
            control["epoch"] = 1
        self._status = np.zeros(16, np.uint32)
        self._symmetric = [_bytes(capacity.block_bytes) for _ in ranks]
        self._local = [_bytes(capacity.local) for _ in ranks]
        self._workspace = [_bytes(source.workspace * workers) for _ in ranks]
        self._scratch = [*self._local, *self._workspace]
        self._scratch += [block[capacity.tensors_offset :] for block in self._symmetric]
        self.arrays = [*self.control, self._status, *self._symmetric, *self._local]
        self.arrays += self._workspace
        self.arguments = [
            fill(
                plan,
                source,
                dims,
                rank,
                capacity,
                Places(
                    peers=[block.ctypes.data for block in self._symmetric],
                    control=self.control[rank].ctypes.data,
                    status=self._status.ctypes.data,
                    workspace=self._workspace[rank].ctypes.data,
                    local=self._local[rank].ctypes.data,
                    wait_limit=WAIT_LIMIT * 1_000_000,
                ),
            )
            for rank in ranks
        ]

    def begin(self) -> None:
        """Fill what no run may expect of another with what is not a number."""
        for scratch in self._scratch:
            scratch[:] = 0xFF


def _compile(text: str, folder: Path, kernels: Path) -> Any:
    """The entry of a program's library, made in `folder` unless it is there."""
    whole = f'#include "cuda.h"\n{text}\n#include "run.h"\n'
    known = hashlib.sha256(whole.encode())
    for file in sorted([*HERE.rglob("*.*h"), *kernels.rglob("*.cuh")]):
        known.update(file.read_bytes())
    path = folder / f"{known.hexdigest()[:16]}.so"
    if not path.exists():
        # Under a name of its own: others may be making the same.
        with TemporaryDirectory(dir=folder) as aside:
            source, made = Path(aside, "program.cpp"), Path(aside, "program.so")
            source.write_text(whole)
            # NOTE: this folder comes first: its ptx/ hides that of the kernels.
            includes = [f"-I{HERE}", f"-I{kernels}"]
            command = [sys.executable, "-m", "ziglang", "cc", *FLAGS, *includes]
            command += [str(source), "-o", str(made)]
            done = subprocess.run(command, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr[-4000:]
            made.replace(path)
    run = ctypes.CDLL(str(path)).run_emulated
    run.restype = ctypes.c_char_p
    pointer, number = ctypes.c_void_p, ctypes.c_int
    run.argtypes = [pointer, pointer, *[number] * 7, ctypes.c_uint64]
    return run


def _encode(
    pointer: int, shape: Sequence[int], dtype: str, itemsize: int, box: TmaBox
) -> np.ndarray[Any, Any]:
    found = np.zeros((), MAP)
    axes = axes_of(shape, itemsize, box)
    found["pointer"], found["itemsize"], found["axes"] = pointer, itemsize, len(axes)
    assert pointer % 16 == 0, "a tensor that bulk copies cannot read"
    for i, (extent, side, pitch) in enumerate(axes):
        assert side <= 256 and (i == 0 or pitch % 16 == 0), f"box {box} of {shape}"
        found["extent"][i], found["side"][i], found["pitch"][i] = extent, side, pitch
    return np.frombuffer(found.tobytes().ljust(MAP_BYTES, b"\0"), np.uint8)


def _bytes(count: int) -> np.ndarray[Any, Any]:
    return _at_multiple(bytes(max(count, 16)))


def _at_multiple(content: bytes, unit: int = 1024) -> np.ndarray[Any, Any]:
    """A copy that begins at a multiple of `unit`."""
    storage = np.zeros(aligned(len(content), unit) + unit, np.uint8)
    at = -storage.ctypes.data % unit
    storage[at : at + len(content)] = np.frombuffer(content, np.uint8)
    return storage[at : at + len(content)]
