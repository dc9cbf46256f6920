"""Emulator: a graph's program on all of its ranks at once, on the CPU."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from math import prod
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from etc_dist.cache import Cache
from etc_dist.codegen import generate
from etc_dist.emulate.places import with_names
from etc_dist.emulate.rank_memory import Array, EmulatedMemory, aligned_copy
from etc_dist.emulate.reports import emulation_error, unfinished
from etc_dist.emulate.shared_library import compile_library
from etc_dist.errors import ArgumentError, expect_range
from etc_dist.ir import GraphFunction
from etc_dist.ir.dims import checked_dims
from etc_dist.ir.graph import expect_graph
from etc_dist.ir.tensor import Tensor
from etc_dist.runtime.array_checks import bind_dims
from etc_dist.runtime.arrays import inspect
from etc_dist.runtime.build import kernels_folder
from etc_dist.runtime.cpu import storage
from etc_dist.runtime.device_faults import Record, decode
from etc_dist.schedule import SCHEDULES
from etc_dist.settings import Settings

MAX_RANKS, MAX_WORKERS = 8, 256
MAX_SEED = 2**64 - 2
"""The random numbers of the next seed are all zero."""
WRITTEN = ("output", "state")
"""The kinds of the caller's arrays that tasks write."""
_running = Lock()
"""Held by each run: emulators may have loaded the same library, which has one state."""


def _renew_lock() -> None:
    global _running
    _running = Lock()


# A thread that held it is not in the child. A run begins with a new state.
os.register_at_fork(after_in_child=_renew_lock)


class Emulator:
    """A graph's CUDA bodies, compiled for the CPU; needs the package `ziglang`. The
    cache of the settings keeps the compiled library.

    graph: a GraphFunction of at most 8 ranks.
    schedule: "static", "dynamic" or "auto", as for `etc_dist.compile`.
    workers: workers of a rank.
    kernels: the device code, if not that of this installation.
    has_far: ranks map the memory of those of their own host only, as on GPUs of several
        hosts of graph.local_size ranks.

    Raises BuildError where the bodies do not compile or there is no C++ compiler, and
    ArgumentError or TypeError for arguments that do not fit."""

    def __init__(
        self,
        graph: GraphFunction,
        *,
        schedule: str = "static",
        workers: int = 4,
        kernels: Path | None = None,
        has_far: bool = False,
    ):
        _check(graph, schedule, workers)
        self.plan = replace(SCHEDULES[schedule](graph), has_far=has_far)
        self.source = generate(self.plan, trace=False)
        self.workers = workers
        store = Cache(Settings.load().cache)
        self.library = compile_library(self.source, kernels or kernels_folder(), store)
        self._run = self.library.run_emulated
        self._run.restype = ctypes.c_char_p
        pointer, number = ctypes.c_void_p, ctypes.c_int
        self._run.argtypes = [pointer, pointer, *[number] * 5, ctypes.c_uint64]
        self._memory: dict[tuple[Any, ...], EmulatedMemory] = {}

    def run(
        self,
        inputs: Sequence[Mapping[str, Array]],
        dims: Mapping[str, int] | None = None,
        *,
        seed: int = 0,
        runs: int = 1,
        in_place: bool = False,
    ) -> list[dict[str, Array]]:
        """Run on each rank's inputs and states, NumPy arrays by tensor name. Returns
        each rank's outputs, and its states after the run, by name. Elements of an
        output that no task wrote are NaN, or -1 where the dtype has no NaN. The given
        arrays stay as they are.

        dims: the numbers of the graph's dims; by default those of the first rank's
            arrays, but for the largest number of rows where ranks have others.
        seed: decides which thread runs next, and when copies complete; the same seed
            repeats a run. Test with several.
        runs: the number of runs in a row; no rank waits for the others in between.
        in_place: outputs have the memory of the inputs over which they may be written;
            a second run reads the results of the first.

        Several threads may call it; their runs follow one another.

        Raises EmulationError for accesses that are out of bounds, not aligned or not
        ordered, and for threads that wait for one another; WaitTimeoutError and
        ArgumentError as a run on GPUs does; ArgumentError or TypeError for arrays that
        do not fit."""
        graph = self.plan.graph
        runs = expect_range(runs, 1, None, "runs")
        seed = expect_range(seed, 0, MAX_SEED, "seed")
        if len(inputs) != graph.world_size:
            raise _wrong("inputs", f"{graph.world_size} mappings", len(inputs))
        dims = _dims_of(graph, inputs) if dims is None else checked_dims(graph, dims)
        of_ranks = [{**dims, **rows} for rows in map(graph.own_rows_of, inputs)]
        arrays = [
            self._arrays(rank, inputs[rank], rank_dims)
            for rank, rank_dims in enumerate(of_ranks)
        ]
        if in_place:
            for rank_arrays in arrays:
                rank_arrays |= {
                    t.name: rank_arrays[t.over] for t in graph.outputs() if t.over
                }
        with _running:
            report, records = self._locked_run(arrays, of_ranks, seed, runs)
        name = f"{graph.name}, {self.plan.schedule} schedule, seed {seed}"
        if records:  # further faults follow from these
            raise unfinished(records, name)
        if report:
            what, _, where = report.rpartition("; ")
            raise emulation_error(what, where, name)
        outputs = [t.name for t in graph.tensors if t.kind in WRITTEN]
        return [{name: rank_arrays[name] for name in outputs} for rank_arrays in arrays]

    def _locked_run(
        self,
        arrays: Sequence[Mapping[str, Array]],
        dims: Sequence[Mapping[str, int]],
        seed: int,
        runs: int,
    ) -> tuple[str, list[Record]]:
        """The failure of a run: the library's report, and the records of the ranks."""
        key = tuple(tuple(rank_dims.values()) for rank_dims in dims)
        # Kept only after a good run: the events and tickets of others have no use.
        memory = self._memory.pop(key, None)
        if memory is None:
            memory = EmulatedMemory(self.plan, self.source, dims, self.workers)
        memory.begin()
        report = self._call(memory, arrays, seed, runs)
        if report:
            of_ranks = (
                memory.places(rank, rank_arrays)
                for rank, rank_arrays in enumerate(arrays)
            )
            report = with_names(report, [*chain.from_iterable(of_ranks)])
        records = [
            record
            for rank in range(len(arrays))
            for record in decode(
                self.plan, memory.control[rank][0], dims[rank], rank, self.workers
            )
        ]
        if not report and not records:
            self._memory[key] = memory
        return report, records

    def _arrays(
        self, rank: int, inputs: Mapping[str, Array], dims: Mapping[str, int]
    ) -> dict[str, Array]:
        """Aligned copies of a rank's inputs and states, and its outputs."""
        graph = self.plan.graph
        env = graph.environment(dims, rank)
        where = f"graph {graph.name}, rank {rank}"
        arrays = storage.bind(graph.given(), inputs, env, where)
        arrays |= {t.name: storage.poisoned(t, env) for t in graph.outputs()}
        by_element = graph.accessed_by_element()
        for tensor in graph.arguments():
            shape = storage.shape_of(tensor, env)
            if not (tensor.has_own_rows and shape[0] == 0):
                _check_rows(tensor, shape, where, tensor.name in by_element)
        return {name: aligned_copy(array) for name, array in arrays.items()}

    def _call(
        self,
        memory: EmulatedMemory,
        arrays: Sequence[Mapping[str, Array]],
        seed: int,
        runs: int,
    ) -> str:
        """The failure of the run, and its thread; empty if it succeeded."""
        output_names = {t.name for t in self.plan.graph.tensors if t.kind in WRITTEN}
        blocks = [
            memory.arguments(rank, rank_arrays)
            for rank, rank_arrays in enumerate(arrays)
        ]
        ranges = [(array, True) for array in memory.arrays]
        ranges += [(block, False) for block in blocks]
        for rank_arrays in arrays:
            results = [
                id(array) for name, array in rank_arrays.items() if name in output_names
            ]
            distinct = {id(array): array for array in rank_arrays.values()}
            ranges += [(array, key in results) for key, array in distinct.items()]
        # Address, end, whether it may be written, and a word for the run.
        rows = sorted(
            (a.ctypes.data, a.ctypes.data + a.nbytes, writes, 0) for a, writes in ranges
        )
        pointers = (ctypes.c_void_p * len(blocks))(*(b.ctypes.data for b in blocks))
        report = self._run(
            pointers,
            np.array(rows, np.uint64).ctypes,
            len(rows),
            len(blocks),
            self.workers,
            self.source.shared_bytes,
            runs,
            seed,
        )
        return (report or b"").decode()


def _check(graph: Any, schedule: Any, workers: Any) -> None:
    expect_graph(graph)
    if schedule not in SCHEDULES:
        raise _wrong("schedule", " or ".join(map(repr, SCHEDULES)), schedule)
    expect_range(workers, 1, MAX_WORKERS, "workers")
    if graph.world_size > MAX_RANKS:
        raise _wrong("graph", f"at most {MAX_RANKS} ranks", graph.world_size)


def _dims_of(
    graph: GraphFunction, inputs: Sequence[Mapping[str, Array]]
) -> dict[str, int]:
    missing = [t.name for t in graph.given() if t.name not in inputs[0]]
    if missing:
        wanted = "an array for each input and state"
        raise _wrong("inputs", wanted, f"none for {', '.join(missing)}")
    dims = bind_dims(graph, {name: inspect(name, a) for name, a in inputs[0].items()})
    rows = [
        n for rank_inputs in inputs for n in graph.own_rows_of(rank_inputs).values()
    ]
    return {
        **dims,
        **({graph.own_dims[1].name: max(rows)} if graph.own_dims and rows else {}),
    }


def _check_rows(
    tensor: Tensor, shape: tuple[int, ...], where: str, is_by_element: bool
) -> None:
    """Raise ArgumentError for arrays that GPUs cannot copy."""
    may_be_odd = is_by_element or tensor.dtype == "int32"
    has_odd_rows = prod(shape[-1:]) * tensor.itemsize % 16 and not may_be_odd
    if has_odd_rows or not prod(shape):
        raise ArgumentError(
            f"tensor {tensor.name} has rows that GPUs cannot copy",
            where=where,
            wanted="at least one row, and rows of a multiple of 16 bytes",
            got=f"{tensor.name} {list(shape)} {tensor.dtype}",
            fix="choose other dims, or pad the rows",
        )


def _wrong(name: str, wanted: str, got: object) -> ArgumentError:
    return ArgumentError(
        f"argument {name} of the emulator does not fit",
        where="etc_dist.emulate.Emulator",
        wanted=wanted,
        got=str(got),
        fix=f"correct {name}",
    )
