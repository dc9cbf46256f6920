"""CpuExecutor: one rank of a world runs a plan with its peers, in shared memory."""

from __future__ import annotations

import random
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from etc_dist.cache import Recent
from etc_dist.codegen.tiles import row_multiples
from etc_dist.errors import (
    ArgumentError,
    EtcDistError,
    WaitRecord,
    WaitTimeoutError,
    WorldError,
    warn_cpu_only,
)
from etc_dist.messages import show_message
from etc_dist.runtime.arrays import Array as Argument
from etc_dist.runtime.cpu import storage
from etc_dist.runtime.cpu.run_state import RunState
from etc_dist.runtime.cpu.storage import Array
from etc_dist.runtime.cpu.workers import SizedPlan, Workers, make_lane_workers
from etc_dist.runtime.last_run import Executor, RunEnd, end_failed_run, timeout_error
from etc_dist.runtime.region_checks import refuse_empty, refuse_rows
from etc_dist.runtime.trace import TaskRecord, Trace
from etc_dist.schedule.plan import WORKERS, Plan
from etc_dist.world import World
from etc_dist.world.processes import Backoff, is_forked, is_of_user

FINISH_SECONDS = 5e-3
"""A bound on the time between reading `aborted` and publishing the end of a run."""
FAR_FINISH_SECONDS = 0.2
"""The same, with the message to other hosts."""
RECORD_SECONDS = 1.0
"""Additional wait limit of a finished rank."""
MOST_SHAPES = 4
"""The shapes whose units and regions are kept for the next run."""


@dataclass(frozen=True)
class PreparedRun:
    """A prepared run: views of its arrays. The caller keeps their memory alive."""

    arrays: Mapping[str, Array]
    dims: Mapping[str, int]


class CpuExecutor(Executor):
    """Runs `plan` with `settings.cpu_workers` simulated workers on each rank.

    Collective: all ranks of `world` create, run and close it alike. A run ends on all
    ranks together, so it can raise the same error on all of them."""

    def __init__(self, plan: Plan, world: World):
        self.workers = world.settings.cpu_workers
        plan.expect_workers(self.workers)
        self._plan, self._world = plan, world
        self._prepared: set[tuple[int, ...]] = set()
        self._state = RunState(plan, world)
        self._shapes: Recent[tuple[Any, ...], SizedPlan] = Recent(MOST_SHAPES)
        self._runs = 0
        self._records: list[TaskRecord] = []
        self._read: set[str] = set()
        self._unfilled: set[str] = set()

    def trace(self) -> Trace:
        """The tasks of the last run on this rank; all ranks of a host share a clock."""
        return Trace.of(self._records, _notes(self._plan), self.workers)

    def prepare(
        self, arrays: Mapping[str, Argument], dims: Mapping[str, int]
    ) -> PreparedRun:
        """Views of the arrays of a run; local. Warns once of dims that GPUs refuse."""
        if (at := tuple(dims.values())) not in self._prepared:
            self._prepared.add(at)
            self._warn(self._plan.graph.environment(dims, self._world.rank))
        views = {name: storage.view_of(array) for name, array in arrays.items()}
        return PreparedRun(views, dict(dims))

    def _warn(self, env: Mapping[str, Any]) -> None:
        graph = self._plan.graph
        try:
            refuse_rows(row_multiples(graph), env, f"graph {graph.name}")
            refuse_empty(graph, env)
        except ArgumentError as error:
            warn_cpu_only(error)

    def launch(self, launch: PreparedRun, stream: Any = None) -> None:
        """Run to the end, see `run`."""
        self.run(launch.arrays, launch.dims)

    def loaded(self, launch: PreparedRun, names: Sequence[str]) -> dict[str, Array]:
        array_by_name = {**launch.arrays, **self._state.own_arrays}
        return {name: array_by_name[name] for name in names}

    def reset(self) -> None:
        self._state.reset()

    def run(self, arrays: Mapping[str, Array], dims: Mapping[str, int]) -> None:
        """Run once on `arrays`, by tensor name: fill the outputs, update the states.

        Collective; `dims` must be alike on all ranks. Raises on every rank
        WaitTimeoutError after `settings.wait_limit` seconds without progress on any
        rank, ArgumentError where arrays or their data do not fit on some rank, and
        WorldError where a task failed on a peer; that peer raises the task's own error.
        After any of these it can run again."""
        graph, rank = self._plan.graph, self._world.rank
        env = graph.environment(dims, rank)
        self._state.prepare(dims, env)
        self._runs += 1
        self._records = []
        for tensor in graph.tensors:
            if tensor.kind == "symmetric":
                storage.poison(self._state.array(tensor.name, rank))
        self._state.start()
        try:
            unmet = self._drive(self._make_workers(env, arrays))
        except BaseException as fault:
            if is_forked():  # in a child of a body; the run continues in the parent
                raise
            if type(fault) is ArgumentError and not is_of_user(fault):
                self._fail(RunEnd(refusal=fault))
            elif not self._completed():
                self._fail(RunEnd(fault=_summary(fault)))
            if not self._world.broken:
                self._world.exclusive.report(fault)
            raise
        finally:
            self._state.forget_arguments()
        if unmet is not None and not self._completed():
            self._fail(RunEnd(records=tuple(unmet)))
        self._show_unfilled()

    def _show_unfilled(self) -> None:
        """Name, once, local and symmetric tensors of floats that bodies have read, and
        of which none has filled an element."""
        graph = self._plan.graph
        if graph.own_dims is not None:
            return  # a rank without rows fills nothing, here or at its peers
        for tensor in map(graph.tensor, sorted(self._read - self._unfilled)):
            if tensor.kind not in ("local", "symmetric"):
                continue
            array = self._state.array(tensor.name, self._world.rank)
            if array.dtype.kind in "iu":
                continue
            if all(storage.still_poisoned(a).all() for a in (array.flat[:1], array)):
                self._unfilled.add(tensor.name)
                show_message(
                    f"etc_dist: no body has filled {tensor.name}, a {tensor.kind} "
                    f"tensor of {graph.name}, on rank {self._world.rank}: it is read "
                    "as NaN. In the bodies of calls that write it, assign to y[...]\n"
                )

    def symmetric(self, name: str) -> Array:
        tensor = self._state.array(name, self._world.rank)
        return tensor.reshape(-1).view(np.uint8)

    def recover(self) -> None:
        self._state.free()

    def close(self) -> None:
        if not self._world.broken:
            self._state.free()

    def _make_workers(
        self, env: dict[str, Any], arrays: Mapping[str, Array]
    ) -> Workers:
        graph, rank = self._plan.graph, self._world.rank
        where = f"graph {graph.name}, rank {rank}"
        own_arrays = storage.bind(graph.arguments(), arrays, env, where)
        for tensor in graph.tensors:
            if tensor.kind == "local":
                own_arrays[tensor.name] = storage.poisoned(tensor, env)
        self._state.own_arrays = own_arrays
        env = {**env, WORKERS.name: self.workers}
        shape = self._shapes.get(key := (*env.items(),))
        if shape is None:
            self._shapes.put(key, shape := SizedPlan(self._plan, env))
        env = {**env, **storage.loads(graph, own_arrays)}
        workers = Workers(
            self._plan,
            env,
            rank,
            self._state.epoch,
            make_lane_workers(self._plan, self.workers),
            self._state,
            self._runs,
            shape,
        )
        self._records, self._read = workers.records, workers.read
        return workers

    def _drive(self, workers: Workers) -> list[WaitRecord] | None:
        """Step the workers in a random order until all ranks have finished. Returns
        this rank's unmet waits if the run was ended."""
        chance = random.Random(self._runs * self._world.size + self._world.rank)
        backoff, beats = Backoff(0.0), -1
        while not self._is_finished(workers):
            live = workers.live
            chance.shuffle(live)
            for worker in live:
                if workers.step(worker):
                    self._state.beat()
            if self._state.aborted:
                return workers.unmet_waits()
            # The limit applies to the time without progress on any rank: a task of a
            # peer may take longer.
            if self._state.beats() != beats:
                backoff, beats = self._backoff(workers), self._state.beats()
            elif not backoff.pause() or backoff.lost:
                return workers.unmet_waits() or self._missing()
        return None

    def _is_finished(self, workers: Workers) -> bool:
        if workers.done and not self._state.aborted:
            self._state.finish()
        return self._state.all_finished()

    def _completed(self) -> bool:
        """End the run, and return whether all ranks had finished it before. Then it is
        complete on all of them, since some may have returned already."""
        self._state.abort()
        has_several = self._world.hosts.count > 1
        time.sleep(FAR_FINISH_SECONDS if has_several else FINISH_SECONDS)
        return self._state.all_finished()

    def _backoff(self, workers: Workers) -> Backoff:
        # A finished rank waits longer, so that others record their waits first.
        limit = self._world.settings.wait_limit
        limit += min(limit, RECORD_SECONDS) if workers.done else 0.0
        return Backoff(limit, self._world.find_lost)

    def _missing(self) -> list[WaitRecord]:
        """Records of the peers that have not finished, although this rank has."""
        rank, epoch, state = self._world.rank, self._state.epoch, self._state
        return [
            WaitRecord(rank, 0, "host", "end of run", f"finished[{peer}]", 0, epoch)
            for peer in range(self._world.size)
            if not state.finished(peer)
        ]

    def _fail(self, own_end: RunEnd) -> None:
        """End the run on all ranks, reset the state for the next run, and raise the
        error of all ranks, unless a task of this rank has raised."""
        self._state.abort()
        world, name = self._world, self._plan.graph.name
        # A rank that agreed to this run but did not start it gets this error at its
        # next call, and recovers with the others in `Program`.
        if not world.find_lost():
            with suppress(WaitTimeoutError):
                self._refuse(timeout_error(world, name, own_end.records))
        error = end_failed_run(world, self, name, own_end)
        if not own_end.fault:
            # NOTE: an error of this rank has the same text.
            raise error from None

    def _refuse(self, error: EtcDistError) -> None:
        """Raise `error` on all ranks, also on those that did not start this run."""
        try:
            self._world.refuse(error)
        except WorldError:
            # The end of a far rank is known only now.
            if not self._world.find_lost():
                raise


def _notes(plan: Plan) -> list[str]:
    """Notes for readers of a trace of this backend."""
    notes = [
        "CPU backend: a rank simulates its workers one task at a time. Bars are as "
        "long as the simulated tasks' CPU time, which is unrelated to that on GPUs. "
        "Gaps are other tasks, waits, and other processes."
    ]
    return notes


def _summary(fault: BaseException) -> str:
    """An error and where it was raised. The failed rank shows the whole traceback."""
    text = "".join(traceback.format_exception_only(fault)).rstrip()
    frame = traceback.extract_tb(fault.__traceback__)[-1]
    return f"{text}\nat {frame.filename}, line {frame.lineno}, in {frame.name}"
